"""A GPT-2-shaped checkpoint: the model it makes, on every mesh, and how little of it each rank reads."""

import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.saving.lazy_tensors import MappedFile
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.jobs import COUNTING, launch, run_job
from ..toys import CLASSES, sgd
from ..trials import require_same
from .split_models import plan_of, run_engines

HIDDEN, DEPTH, HEADS, LENGTH = 16, 2, 4, 8
OPTIONS = GPTOptions(hidden=HIDDEN, depth=DEPTH, heads=HEADS, activation="gelu_tanh")
Weights = dict[str, Tensor]


def draw_checkpoint(prefix: str = "", *, head: bool = False) -> Weights:
    """Return random weights under GPT-2's names; norms are no identity, and positions are more than the model's."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) / 4

    made = {"wte.weight": draw(CLASSES, HIDDEN), "wpe.weight": draw(LENGTH + 3, HIDDEN)}
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(DEPTH):
        for norm in ("ln_1", "ln_2"):
            made |= {f"h.{layer}.{norm}.{kind}": draw(HIDDEN) for kind in ("weight", "bias")}
        for name, (rows, columns) in sizes.items():
            made[f"h.{layer}.{name}.weight"] = draw(rows * HIDDEN, columns * HIDDEN)
            made[f"h.{layer}.{name}.bias"] = draw(columns * HIDDEN)
        made[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
    made |= {f"ln_f.{kind}": draw(HIDDEN) for kind in ("weight", "bias")}
    made = {f"{prefix}{name}": tensor for name, tensor in made.items()}
    return made | ({"lm_head.weight": draw(CLASSES, HIDDEN)} if head else {})


def run_gpt2(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """GPT-2, spelled out from its paper: ids (B, S) → logits (B, S, V)."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(x: Tensor, name: str) -> Tensor:
        length, width = x.shape[1], HIDDEN // HEADS
        query, key, value = product(x, f"{name}.c_attn").split(HIDDEN, -1)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = []
        for head in range(HEADS):
            own = slice(head * width, (head + 1) * width)
            scores = query[..., own] @ key[..., own].transpose(1, 2) / math.sqrt(width)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[..., own])
        return product(torch.cat(mixed, -1), f"{name}.c_proj")

    def transform(x: Tensor, name: str) -> Tensor:
        wide = product(x, f"{name}.c_fc")
        bent = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        return product(bent, f"{name}.c_proj")

    x = weights["wte.weight"][ids] + weights["wpe.weight"][: ids.shape[1]]
    for layer in range(DEPTH):
        x = x + attend(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn")
        x = x + transform(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp")
    return norm(x, "ln_f") @ weights.get("lm_head.weight", weights["wte.weight"]).t()


def on_ranks(plan: qs.Plan, body: Callable[[Engine], Any], options: GPTOptions = OPTIONS) -> list[Any]:
    """Call with an engine of the model on each rank."""
    blocks = gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), options)
    how = {"optimizer": sgd, "dtype": torch.float64, "tied": gpt_tied(options)}
    return run_engines(plan, lambda: blocks, body, cross_entropy_sum, **how)


def load_alone(path: Path, options: GPTOptions = OPTIONS) -> Engine:
    """Load a checkpoint into a model in one process."""

    def body(engine: Engine) -> Engine:
        engine.load_pretrained(path)
        return engine

    return on_ranks(plan_of("dp=1", 0), body, options)[0]


def write(folder: Path, weights: Weights, config: Mapping[str, Any] | None = None) -> Path:
    path = folder / "model.safetensors"
    save_file(weights, path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("prefix", "head"), [("", True), ("transformer.", False)])
def test_the_model_is_gpt2(tmp_path: Path, prefix: str, head: bool) -> None:
    config = {"n_head": HEADS, "n_embd": HIDDEN, "activation_function": "gelu_new", "vocab_size": CLASSES}
    weights = draw_checkpoint(prefix, head=head)
    path = write(tmp_path, weights, config)
    ids = torch.randint(CLASSES, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    plain = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    with torch.no_grad():
        found = nn.Sequential(*load_alone(path).stages[0].blocks.values())(ids)
    torch.testing.assert_close(found, run_gpt2(plain, ids), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("mesh", "tied"), [("dp=2,tp=4", False), ("pp=2,tp=2", True)])
def test_every_mesh_has_it_alike_and_a_rank_reads_what_it_holds(tmp_path, monkeypatch, mesh, tied):
    path, options = write(tmp_path, draw_checkpoint()), OPTIONS.model_copy(update={"tied": tied})
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, tied={"embedding": (0, 1)} if tied else {})
    asked: dict[int, int] = {}
    reading = MappedFile._read_places

    def counted(file: MappedFile, name: str, places: Any) -> Tensor:
        found = reading(file, name, places)
        asked[threading.get_ident()] = asked.get(threading.get_ident(), 0) + found.nbytes
        return found

    def body(engine: Engine) -> Weights:
        engine.load_pretrained(path)
        held = sum(p.nbytes for stage in engine.stages.values() for p in stage.parameters())
        assert asked[threading.get_ident()] == held
        return engine.full_weights()

    monkeypatch.setattr(MappedFile, "_read_places", counted)
    found = {name: weight for rank in on_ranks(plan, body, options) for name, weight in rank.items()}
    require_same(found, load_alone(path, options).full_weights())


def raised_by(path: Path, options: GPTOptions = OPTIONS) -> qs.QuintschedError:
    with pytest.raises(qs.QuintschedError) as caught:
        load_alone(path, options)
    return caught.value


def test_other_shapes(tmp_path: Path) -> None:
    weights = draw_checkpoint()
    for name, shape, needs in (
        ("h.1.mlp.c_fc.weight", (16, 60), "2.mlp.fc1.weight needs (16, 64): axis 1"),
        ("h.0.attn.c_attn.bias", (50,), "1.attention.qkv.bias needs (48,): axis 0"),
        ("wpe.weight", (7, 16), "0.positions.weight needs (8, 16): axis 0"),
        ("wte.weight", (11, 16), "0.tokens.weight needs (10, 16): axis 0"),
        ("ln_f.bias", (16, 1), "3.norm.bias needs (16,): it has other axes"),
    ):
        error = raised_by(write(tmp_path, weights | {name: torch.zeros(shape)}))
        assert isinstance(error, qs.MisfitError)
        assert f"{name!r} is {shape}, but {needs}" in str(error)


@pytest.mark.parametrize(
    ("options", "odd"),
    [
        ({"norm": "rmsnorm"}, "only the checkpoint has 'norm1.bias' in block 1"),
        ({"positions": "rope"}, "only the checkpoint has 'positions.weight' in block 0"),
        ({"kv_heads": 2}, "only the model has 'attention.k_proj.bias' in block 1"),
        ({"activation": "swiglu"}, "only the checkpoint has 'mlp.fc1.bias' in block 1"),
        ({"biases": False}, "only the checkpoint has 'attention.proj.bias' in block 1"),
        ({"qk_norm": True}, "only the model has 'attention.k_norm.weight' in block 1"),
        ({"head_size": 8}, "its heads are not as wide as hidden"),
        ({"depth": 3}, "the checkpoint has 2 layers, the model 3; set depth: 2"),
        ({"activation": "gelu"}, "the checkpoint's activation is gelu_new"),
        ({"heads": 2}, "the checkpoint has heads of width 4, the model 8; set heads: 4"),
    ],
)
def test_other_options(tmp_path: Path, options: dict[str, Any], odd: str) -> None:
    path = write(tmp_path, draw_checkpoint(), {"n_embd": HIDDEN, "n_head": HEADS})
    error = raised_by(path, OPTIONS.model_copy(update=options))
    assert isinstance(error, qs.MisfitError)
    assert odd in str(error)


def test_broken_checkpoints(tmp_path: Path) -> None:
    weights = draw_checkpoint()
    del weights["h.1.ln_2.weight"]
    path, index = write(tmp_path, weights), tmp_path / "model.safetensors.index.json"
    for file, text, message in (
        (path, None, "the checkpoint has no tensor 'h.1.ln_2.weight'"),
        (path, "not a checkpoint at all", "not a safetensors file"),
        (index, '{"weight_map": {"wte.weight": "../o.safetensors"}}', "'../o.safetensors' is not the name of a file"),
        (index, '{"weight_map": 3}', "/weight_map"),
        (index, '{"weight_map": ', "not JSON"),
        (index, '{"weight_map": {"h.1.ln_1.bias": "gone.safetensors", "a": "gone.safetensors"}}', "gone.safetensors"),
    ):
        if text is not None:
            file.write_text(text)
        error = raised_by(file)
        assert isinstance(error, qs.InputError)
        assert message in str(error)
    path.unlink()
    index.unlink()
    assert isinstance(raised_by(tmp_path), qs.UsageError)


def test_a_job_starts_from_a_checkpoint_and_a_resumed_one_does_not_read_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.py").write_text(COUNTING.replace("% 16", "% 10").replace("=16", "=10"))
    weights = draw_checkpoint()
    path = write(tmp_path, weights)
    values: dict[str, Any] = {
        "model": {"name": "gpt", "options": OPTIONS.model_dump(), "pretrained": str(path)},
        "data": {"name": "data.py:load"},
        "parallel": {"mesh": "pp=2", "microbatches": 2},
        "train": {"epochs": 1, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.0}},
        "checkpoint": {"dir": "out"},
    }
    ids = (torch.arange(96)[64:, None] + torch.arange(9)) % 10
    logits = run_gpt2(weights, ids[:, :-1])
    expected = pytest.approx(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), abs=1e-10)
    assert run_job(values)[-1]["validation_loss"] == expected
    path.unlink()
    longer = {"train": {"epochs": 2}}
    assert run_job(values, longer, arguments=("--resume",))[-1]["validation_loss"] == expected
    assert launch(values, arguments=("--fresh",)) == 2
