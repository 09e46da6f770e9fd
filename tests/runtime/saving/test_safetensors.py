"""Folders of safetensors under names of whatever kind: read on every mesh, written from every mesh, bit for bit."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.runtime import Engine, LoadedWeights
from quintsched.runtime.splitting.split_whole_model import Split as SplitModel

from ..trials import require_same
from .split_models import WIDTH, Split, plan_of, run_engines, train

Weights = dict[str, Tensor]


def loaded(folder: Path, blocks: Callable[[], Sequence[nn.Module]], **how: Any) -> Weights:
    """Return the weights of one process that has loaded a folder."""

    def body(engine: Engine) -> Weights:
        engine.load_pretrained(folder, **how)
        return engine.full_weights()

    return run_engines(plan_of("dp=1", 0), blocks, body)[0]


def own_state(blocks: Split) -> Weights:
    held = nn.Sequential(*blocks).state_dict()
    return {own: held[ours].clone() for ours, own in blocks.own_names.items()}


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,tp=2", 3), ("pp=2,tp=2", 0)])
def test_what_was_loaded_and_trained_is_saved_as_the_engine_has_it(tmp_path: Path, mesh: str, zero: int) -> None:
    weights = {name: tensor + 1 for name, tensor in own_state(Split()).items()}
    (tmp_path / "in").mkdir()
    save_file(weights, tmp_path / "in" / "model.safetensors")

    def body(engine: Engine) -> Weights:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "untrained")
        train(engine)
        engine.save_pretrained(tmp_path / "out", max_file_bytes=6000)
        return engine.full_weights()

    plan = plan_of(mesh, zero)
    trained = {name: tensor for rank in run_engines(plan, Split, body) for name, tensor in rank.items()}
    own, found = Split().own_names, read_folder(tmp_path / "out")
    require_same(read_folder(tmp_path / "untrained"), weights)
    require_same(found, {own[name]: tensor for name, tensor in trained.items()})
    assert not torch.equal(found["layers.1.attention.qkv.weight"], weights["layers.1.attention.qkv.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "toy", "dtype": "float64"}
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 3


def read_folder(folder: Path) -> Weights:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert {file.name for file in files} == set(index["weight_map"].values())
        for file in files:
            for name in load_file(file):
                assert index["weight_map"][name] == file.name
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_short_types_are_saved_as_blocks_compute_or_as_their_masters(tmp_path: Path) -> None:
    def body(engine: Engine) -> tuple[Weights, Weights]:
        train(engine)
        engine.save_pretrained(tmp_path / "short")
        engine.save_pretrained(tmp_path / "long", dtype=torch.float32)
        return engine.full_weights(), engine.state_dict()

    found = run_engines(plan_of("dp=2", 3), Split, body, dtype=torch.bfloat16)
    short, long, own = read_folder(tmp_path / "short"), read_folder(tmp_path / "long"), Split().own_names
    for weights, _ in found:
        require_same(short, {own[name]: tensor for name, tensor in weights.items()})
    key = "1.fc1.weight"
    masters = torch.cat([state[f"model.{key}"].flatten() for _, state in found if f"model.{key}" in state])
    assert long[own[key]].dtype == torch.float32
    assert torch.equal(long[own[key]].flatten(), masters[: long[own[key]].numel()])
    assert not torch.equal(long[own[key]], short[own[key]].float())


def test_a_first_part_of_names_may_be_there_or_not(tmp_path: Path) -> None:
    for stored, needed in (("", "model."), ("model.", ""), ("bert.", "bert.")):
        weights = own_state(Split(stored))
        save_file(weights, tmp_path / "model.safetensors")
        found = loaded(tmp_path, lambda needed=needed: Split(needed))
        assert all(torch.equal(found[ours], weights[own]) for ours, own in Split(stored).own_names.items())


def refused(folder: Path) -> tuple[type[BaseException], str]:
    """Return what both ranks say."""

    def body(engine: Engine) -> tuple[type[BaseException], str]:
        with pytest.raises((InputError, MisfitError)) as caught:
            engine.load_pretrained(folder)
        return type(caught.value), str(caught.value).removesuffix(f"\non rank {engine.transport.rank} of 2")

    (said,) = set(run_engines(plan_of("pp=2", 0), Split, body))
    return said


def test_all_ranks_refuse_what_is_missing_or_too_much_or_of_another_shape_in_the_same_words(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", own_state(Split())
    save_file({name.replace("head.bias", "h3ad.bias"): tensor for name, tensor in state.items()}, path)
    kind, said = refused(tmp_path)
    assert kind is InputError
    for words in ("has no tensor 'head.bias'", "did you mean 'h3ad.bias'?", "fresh=['head.bias']"):
        assert words in said
    save_file(state | {"head.weight": torch.zeros(5, WIDTH)}, path)
    assert "'head.weight' is (5, 16), but 4.weight needs (4, 16): axis 0 differs" in refused(tmp_path)[1]
    save_file(state | {"layers.3.fc1.weight": torch.zeros(2), "rotary_emb.inv_freq": torch.zeros(2)}, path)
    words = "the model has no weight for 'layers.3.fc1.weight' of the checkpoint; did you mean"
    assert words in refused(tmp_path)[1]


def test_what_is_said_to_be_missing_or_too_much_may_be(tmp_path: Path) -> None:
    initial = own_state(Split())
    weights = initial | {"layers.3.fc1.weight": torch.zeros(2)}
    del weights["head.weight"], weights["head.bias"]
    save_file(weights, tmp_path / "model.safetensors")

    def body(engine: Engine) -> tuple[LoadedWeights, Weights]:
        return engine.load_pretrained(tmp_path, fresh=["head.*"], strict=False), engine.full_weights()

    for found, held in run_engines(plan_of("pp=2", 0), Split, body):
        assert found == LoadedWeights(fresh=("4.weight", "4.bias"), unused=("layers.3.fc1.weight",))
        assert all(torch.equal(held[name], initial["head.weight"]) for name in held if name == "4.weight")


def test_names_may_be_given(tmp_path: Path) -> None:
    weights = {name: tensor + 1 for name, tensor in own_state(Split()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    found = loaded(tmp_path, lambda: [*Split()], names=Split().own_names)
    require_same(found, {name: tensor + 1 for name, tensor in nn.Sequential(*Split()).state_dict().items()})
    with pytest.raises(UsageError, match=r"the model has no tensor '4\.wieght'; did you mean '4\.weight'"):
        loaded(tmp_path, lambda: [*Split()], names={"4.wieght": "x"})


MIXTRAL = {
    **{"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def mixtral(seed: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    made: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL))
    return made.double()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 3)])
def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path, mesh: str, zero: int) -> None:
    """By a block that holds the model's tensors under its names, and cannot be run."""
    origin, other = mixtral(1), mixtral(2)
    origin.save_pretrained(tmp_path / "in")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "in" / "model.safetensors")
    conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
    conversions = conversion_mapping.get_model_conversion_mapping(other)
    how = {"own_names": {f"0.{name}": name for name in other.state_dict()}, "config": other.config}

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "out")

    run_engines(plan_of(mesh, zero), lambda: SplitModel([copy.deepcopy(other)], conversions=conversions, **how), body)
    found, info = type(origin).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    require_same(found.state_dict(), origin.state_dict())
