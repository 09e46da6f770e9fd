"""Mixtures of transformers: stored expert by expert, trained as one tensor, and stored as `from_pretrained` reads them.

Other models, loaded, trained on meshes and saved, are in train/test_finetune.py.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.pretrained.load_pretrained import LoadedWeights
from quintsched.runtime.splitting.split_model import Split

from .split_models import plan_of, require_same, run_engines

transformers = pytest.importorskip("transformers")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **HEADS))
    return made.double()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 3)])
def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path, mesh: str, zero: int) -> None:
    """By a block that holds the model's tensors under its names, and cannot be run."""
    origin, other = mixtral(1), mixtral(2)
    origin.save_pretrained(tmp_path / "in")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "in" / "model.safetensors")
    conversions = conversion_mapping.get_model_conversion_mapping(other)
    how = {"own_names": {f"0.{name}": name for name in other.state_dict()}, "config": other.config}

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "out")

    run_engines(plan_of(mesh, zero), lambda: Split([copy.deepcopy(other)], conversions=conversions, **how), body)
    found, info = type(origin).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    require_same(found.state_dict(), origin.state_dict())
