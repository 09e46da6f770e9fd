"""LoRA by PEFT on models of transformers, with gradient checkpointing: the numbers of one process on every mesh."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import split

from ..helpers.training import train_ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries are theirs

IDS, LENGTH, SAMPLES, STEPS = 32, 6, 8, 2


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=IDS, num_attention_heads=4, num_key_value_heads=2, **sizes)
    config.use_cache = False
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=IDS, n_embd=16, n_layer=2, n_head=4, n_positions=64)
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)


def adapted(model: Any, *, drop: float = 0.0, reentrant: bool | None = None) -> nn.Module:
    """A model with LoRA, the same whenever it is made; `reentrant`: with gradient checkpointing, and of which kind."""
    torch.manual_seed(0)
    targets = ["c_attn", "c_proj"] if model is gpt2 else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=targets, lora_dropout=drop, fan_in_fan_out=model is gpt2, init_lora_weights=False
    )
    made = peft.get_peft_model(model().double(), config).double()
    if reentrant is not None:
        made.enable_input_require_grads()
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return made.train()  # type: ignore[no-any-return]


def cross_entropy(output: Any, targets: Tensor) -> tuple[Tensor, float]:
    logits = output["logits"] if isinstance(output, dict) else output
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")
    return loss, float(targets.numel())


adamw = partial(torch.optim.AdamW, lr=1e-2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(IDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(-1, 1)


BATCHES = [batch(step) for step in range(STEPS)]


def losses(model: nn.Module, request_of: dict[str, Any]) -> list[float]:
    plan = qs.compile(**{"schedule": "1f1b", "microbatches": 4, **request_of})
    return train_ranks(plan, model, cross_entropy, adamw, BATCHES, cut=split)[0].losses


@pytest.mark.parametrize("model", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_dropout_and_checkpointing_of_layers_change_nothing(model: Any) -> None:
    alone = losses(adapted(model, drop=0.3), {"mesh": "dp=1"})
    for reentrant, request_of in (
        (True, {"mesh": "pp=2", "schedule": "zb-h1"}),
        (False, {"mesh": "tp=2"}),
        (False, {"mesh": "dp=2", "microbatches": 2, "zero": 3}),
    ):
        checkpointed = adapted(model, drop=0.3, reentrant=reentrant)
        assert losses(checkpointed, request_of) == pytest.approx(alone, rel=1e-7), request_of
