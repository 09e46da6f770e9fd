"""Fine-tuning as people do: padded batches of changing lengths, a smaller last one, LoRA, accuracy, `from_pretrained`.

What a job makes of it on a mesh is what a plain loop of torch makes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import JobConfig, Trainer, Transport, plan_of, run_local, split

from ...helpers.training import Step, train_model, train_ranks
from ..families.cells import Doubles

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries are theirs

IDS, EPOCHS, RATE = 24, 2, 1e-2

FILE = """
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from quintsched.runtime.data import Loaders

random = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(24, (2 + 5 * n % 7,), generator=random) for n in range(14)]

def build(data, pretrained=None, adapt=None):
    if adapt is None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pretrained))
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(adapt, dtype=torch.float64)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config).double()

def load(replica, num_replicas):
    def batches(texts, size=4 // num_replicas):
        mine = texts[replica::num_replicas]
        return [padded(mine[at : at + size]) for at in range(0, len(mine), size)]
    return Loaders(batches(TEXTS[:11]), validation=batches(TEXTS[11:]))

def padded(texts):
    def stack(rows, value):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    masks = [torch.ones_like(row) for row in texts]
    return {"input_ids": stack(texts, 0), "attention_mask": stack(masks, 0), "labels": stack(texts, -100)}

def halves(logits, labels):
    losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / 2, (labels[:, 1:] != -100).sum() / 2
"""


def gpt2() -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=IDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, **drops)
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=IDS, **sizes))
    return made


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """The user's file, as Python reads it."""
    (tmp_path / "mine.py").write_text(FILE)
    found: dict[str, Any] = {}
    exec(FILE, found)
    return found


def saved(model: nn.Module, folder: Path) -> Path:
    """Write a checkpoint whose logits differ enough for an accuracy."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.double().save_pretrained(folder, max_shard_size="5KB")  # type: ignore[operator]
    return folder


def finetuned(folder: Path, mesh: str, model: dict[str, Any], **train: Any) -> list[dict[str, float]]:
    """Run a job on a mesh, save what it has trained, and return its figures of each epoch."""
    job = JobConfig.model_validate(
        {
            "model": {"name": f"{folder}/mine.py:build", **model},
            "data": {"name": f"{folder}/mine.py:load"},
            "parallel": {"mesh": mesh, "microbatches": 2},
            "train": {"epochs": EPOCHS, "batch_size": 4, "clip": 1.0, "optimizer": {"lr": RATE}, **train},
            "checkpoint": {"export": f"{folder}/{mesh}"},
            "runtime": {"precision": "float64"},
        }
    )

    def run(transport: Transport) -> list[Any]:
        with Doubles():
            return Trainer.of_job(job, plan_of(job), transport).fit()

    return run_local(plan_of(job).mesh.size, run, timeout_s=120)[0]


def plainly(model: nn.Module, loaders: Any) -> list[dict[str, float]]:
    """Train as one does without us; figures as the job's."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)

    def of(batches: Any, *, learns: bool) -> tuple[float, float]:
        steps = [Step([(ids, labels, more)], learns) for ids, labels, more in map(parts, batches)]
        found = train_model(model, optimizer, summed, steps, clip=1.0, metric=right, around=Doubles)
        counts, shares = torch.tensor(found.figures, dtype=torch.float64).T
        losses = torch.tensor(found.losses, dtype=torch.float64)
        return tuple((each * counts / counts.sum()).sum().item() for each in (losses, shares))

    epochs = [of(loaders.train, learns=True) + of(loaders.validation, learns=False) for _ in range(EPOCHS)]
    names = ("loss", "accuracy", "validation_loss", "validation_accuracy")
    return [dict(zip(names, figures, strict=True)) for figures in epochs]


def parts(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return batch["input_ids"], batch["labels"][:, 1:], {"attention_mask": batch["attention_mask"]}


def summed(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


def right(output: Any, labels: Tensor) -> Tensor:
    return (output.logits[:, :-1].argmax(-1) == labels).sum()


def require_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert {name: one[name] for name in other} == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_model_is_trained_and_saved_as_by_a_plain_loop(names, tmp_path, has_adapters):
    peft = pytest.importorskip("peft")
    start = saved(llama() if has_adapters else gpt2(), tmp_path / "start")
    given: dict[str, Any] = {"options": {"adapt": str(start)}} if has_adapters else {"pretrained": str(start)}
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float64)
    model = names["build"](None, adapt=start) if has_adapters else load(start)
    expected = plainly(model, names["load"](0, 1))
    assert expected[-1]["loss"] < expected[0]["loss"]
    for mesh in ("dp=2,pp=2", "tp=2,pp=2"):
        require_equal(finetuned(tmp_path, mesh, given), expected)
        folder = tmp_path / mesh
        found = peft.PeftModel.from_pretrained(load(start), folder) if has_adapters else load(folder)
        assert found.state_dict().keys() == model.state_dict().keys()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_a_loss_of_ones_own_has_no_accuracy(names: dict[str, Any], tmp_path: Path) -> None:
    start = saved(gpt2(), tmp_path / "start")
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    expected = plainly(model, names["load"](0, 1))
    found = finetuned(tmp_path, "pp=2", {"pretrained": str(start)}, loss=f"{tmp_path}/mine.py:halves")
    require_equal(found, [{name: f[name] for name in ("loss", "validation_loss")} for f in expected])
    assert all("accuracy" not in figures for figures in found)
    with pytest.raises(qs.UsageError, match="is a list, not a function"):
        finetuned(tmp_path, "pp=2", {"pretrained": str(start)}, loss=f"{tmp_path}/mine.py:TEXTS")


def losses_of_adapters(
    model: Callable[[], nn.Module], mesh: str, zero: int = 0, schedule: str = "1f1b", **how: Any
) -> list[float]:
    """Train adapters with dropout; `use_reentrant`: with gradient checkpointing, and of which kind."""
    peft, ids = pytest.importorskip("peft"), torch.arange(48).view(8, 6) % IDS
    torch.manual_seed(0)
    layers = ["c_attn", "c_proj"] if model is gpt2 else ["q_proj", "v_proj", "down_proj"]
    told = {"lora_dropout": 0.3, "fan_in_fan_out": model is gpt2, "init_lora_weights": False}
    base = model().double()
    base.config.use_cache = False
    made = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=layers, **told)).double()
    if how:
        made.enable_input_require_grads()
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)

    def loss(output: Any, targets: Tensor) -> Tensor:
        logits = output["logits"] if isinstance(output, dict) else output
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    plan = qs.compile(schedule, mesh=mesh, microbatches=2, zero=zero)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    return train_ranks(plan, made.train(), loss, adam, [(ids, ids.roll(-1, 1))] * 2, cut=split)[0].losses


@pytest.mark.parametrize("model", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_dropout_and_checkpointing_of_adapted_layers_change_nothing(model: Callable[[], nn.Module]) -> None:
    alone = losses_of_adapters(model, "dp=1")
    for found in (
        losses_of_adapters(model, "pp=2", schedule="zb-h1", use_reentrant=True),
        losses_of_adapters(model, "tp=2", use_reentrant=False),
        losses_of_adapters(model, "dp=2", zero=3, use_reentrant=False),
    ):
        assert found == pytest.approx(alone, rel=1e-7)
