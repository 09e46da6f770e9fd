"""A GPT-2-shaped checkpoint: the model it makes, on every mesh, and how little of it each rank reads."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import InputError, MisfitError, QuintschedError, UsageError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.saving.stored_tensors import MappedFile
from quintsched.runtime.settings.job_file import JobConfig
from quintsched.runtime.settings.run_settings import Start
from quintsched.runtime.train.summed_losses import cross_entropy_sum
from quintsched.runtime.train.trainer import Trainer

from ..toys import CLASSES, sgd

HIDDEN, DEPTH, HEADS, LENGTH = 16, 2, 4, 8
OPTIONS = GPTOptions(hidden=HIDDEN, depth=DEPTH, heads=HEADS, activation="gelu_tanh")
Weights = dict[str, Tensor]


def draw_checkpoint(prefix: str = "", *, head: bool = False, dtype: torch.dtype = torch.float64) -> Weights:
    """Return random weights under GPT-2's names; norms are no identity, and positions are more than the model's."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random, dtype=torch.float64) / 4).to(dtype)

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


def make_engine(
    transport: Transport,
    plan: qs.Plan,
    options: GPTOptions = OPTIONS,
    *,
    dtype: torch.dtype = torch.float64,
    tokens: int = CLASSES,
    length: int = LENGTH,
) -> Engine:
    blocks = gpt(DataSpec(input_shape=(length,), num_classes=tokens), options)
    tied = gpt_tied(options)
    return Engine(plan, blocks, cross_entropy_sum, sgd, dtype=dtype, tied=tied, clip=1.0, transport=transport)


def load_alone(path: Path, options: GPTOptions = OPTIONS, **settings: Any) -> Engine:
    """Load a checkpoint into a model in one process."""
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=1)

    def body(transport: Transport) -> Engine:
        engine = make_engine(transport, plan, options, **settings)
        engine.load_pretrained(path)
        return engine

    return run_local(1, body)[0]


def write(folder: Path, weights: Weights, config: Mapping[str, Any] | None = None) -> Path:
    path = folder / "model.safetensors"
    save_file(weights, path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return path


def write_in_two(folder: Path, weights: Weights) -> None:
    """Write two files and the index of both."""
    where = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def logits_of(engine: Engine, ids: Tensor) -> Tensor:
    model = nn.Sequential(*engine.stages[0].blocks.values())
    with torch.no_grad():
        out: Tensor = model(ids)
    return out


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("head", [False, True])
def test_the_model_is_gpt2(tmp_path: Path, prefix: str, head: bool) -> None:
    config = {"n_head": HEADS, "n_embd": HIDDEN, "activation_function": "gelu_new", "vocab_size": CLASSES}
    weights = draw_checkpoint(prefix, head=head)
    path = write(tmp_path, weights, config)
    ids = torch.randint(CLASSES, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    plain = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    found = logits_of(load_alone(path), ids)
    torch.testing.assert_close(found, run_gpt2(plain, ids), rtol=0, atol=1e-10)


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    weights = draw_checkpoint()
    write_in_two(tmp_path, weights)
    ids = torch.randint(CLASSES, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        torch.testing.assert_close(logits_of(load_alone(path), ids), run_gpt2(weights, ids), rtol=0, atol=1e-10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["pp=2", "tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,tp=4"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_has_it_alike(tmp_path: Path, mesh: str, tied: bool) -> None:
    path, options = write(tmp_path, draw_checkpoint()), OPTIONS.model_copy(update={"tied": tied})
    axes = qs.Mesh.parse(mesh)
    plan = qs.compile("1f1b", mesh=axes, microbatches=2, tied={"embedding": (0, 1)} if tied and axes.pp > 1 else {})

    def body(transport: Transport) -> Weights:
        engine = make_engine(transport, plan, options)
        engine.load_pretrained(path)
        return engine.full_weights()

    found = {name: weight for rank in run_local(plan.mesh.size, body) for name, weight in rank.items()}
    expected = load_alone(path, options).full_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_masters_keep_what_bfloat16_does_not(tmp_path: Path) -> None:
    weights = draw_checkpoint(dtype=torch.float32)
    engine = load_alone(write(tmp_path, weights), dtype=torch.bfloat16)
    state = engine.state_dict()["model.1.attention.qkv.weight"]
    assert torch.equal(state, weights["h.0.attn.c_attn.weight"].t())
    low = engine.stages[0].get_parameter("blocks.1.attention.qkv.weight")
    assert torch.equal(low, state.to(torch.bfloat16))


def test_a_rank_reads_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, draw_checkpoint())
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)
    asked: dict[int, int] = {}
    reading = MappedFile._read_places

    def counted(file: MappedFile, name: str, places: Any) -> Tensor:
        found = reading(file, name, places)
        asked[threading.get_ident()] = asked.get(threading.get_ident(), 0) + found.nbytes
        return found

    def body(transport: Transport) -> int:
        engine = make_engine(transport, plan)
        engine.load_pretrained(path)
        read = asked[threading.get_ident()]
        assert read == sum(p.nbytes for stage in engine.stages.values() for p in stage.parameters())
        return read

    monkeypatch.setattr(MappedFile, "_read_places", counted)
    read = run_local(4, body)
    asked.clear()
    load_alone(path)
    assert max(read) <= 0.3 * sum(asked.values())


def raised_by(path: Path, options: GPTOptions = OPTIONS, **settings: Any) -> QuintschedError:
    with pytest.raises(QuintschedError) as caught:
        load_alone(path, options, **settings)
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
        assert isinstance(error, MisfitError)
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
    assert isinstance(error, MisfitError)
    assert odd in str(error)


def test_a_head_of_its_own_does_not_fit_a_tied_model(tmp_path: Path) -> None:
    tied = OPTIONS.model_copy(update={"tied": True})
    weights = draw_checkpoint(head=True)
    error = raised_by(write(tmp_path, weights), tied)
    assert isinstance(error, MisfitError)
    assert "'lm_head.weight' and 'wte.weight' differ" in str(error)
    path = write(tmp_path, weights | {"lm_head.weight": weights["wte.weight"].clone()})
    assert torch.equal(load_alone(path, tied).full_weights()["3.head.weight"], weights["wte.weight"])


def test_broken_checkpoints(tmp_path: Path) -> None:
    weights = draw_checkpoint()
    del weights["h.1.ln_2.weight"]
    path = write(tmp_path, weights)
    error = raised_by(path)
    assert isinstance(error, InputError)
    assert "the checkpoint has no tensor 'h.1.ln_2.weight'" in str(error)
    path.write_bytes(b"not a checkpoint at all")
    assert "not a safetensors file" in str(raised_by(path))
    path.unlink()
    assert isinstance(raised_by(tmp_path), UsageError)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"wte.weight": "../other.safetensors"}}', "'../other.safetensors' is not the name of a file"),
        ('{"weight_map": 3}', "/weight_map"),
        ('{"weight_map": ', "not JSON"),
        ('{"weight_map": {"h.1.ln_1.bias": "gone.safetensors", "wte.weight": "gone.safetensors"}}', "gone.safetensors"),
    ):
        index.write_text(text)
        error = raised_by(tmp_path)
        assert isinstance(error, InputError)
        assert message in str(error)


COUNTING = """
import numpy as np
from quintsched.runtime.data import Dataset, Split

def load():
    ids = (np.arange(48)[:, None] + np.arange(9)) % 10
    split = lambda part: Split(inputs=part[:, :-1].astype(np.int64), targets=part[:, 1:].astype(np.int64))
    return Dataset(name="counting", train=split(ids[:32]), validation=split(ids[32:]), num_classes=10)
"""


def test_a_job_starts_from_a_checkpoint_and_a_resumed_one_does_not_read_it(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    (tmp_path / "weights").mkdir()
    weights = draw_checkpoint()
    path = write(tmp_path / "weights", weights)
    values: dict[str, Any] = {
        "model": {"name": "gpt", "options": OPTIONS.model_dump(), "pretrained": str(path)},
        "data": {"name": f"{tmp_path / 'data.py'}:load"},
        "parallel": {"mesh": "pp=2", "microbatches": 2},
        "train": {"epochs": 1, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.0}},
        "runtime": {"precision": "float64"},
        "checkpoint": {"dir": str(tmp_path / "out")},
    }

    def fit(start: Start, epochs: int) -> list[Any]:
        job = JobConfig.model_validate(values | {"train": values["train"] | {"epochs": epochs}})
        plan = plan_of(job)
        return run_local(2, lambda transport: Trainer.of_job(job, plan, transport).fit(start))

    (record,), _ = fit("new", epochs=1)
    ids = (torch.arange(48)[:, None] + torch.arange(9)) % 10
    expected = F.cross_entropy(run_gpt2(weights, ids[32:, :-1]).flatten(0, 1), ids[32:, 1:].flatten()).item()
    assert record["validation_loss"] == pytest.approx(expected, abs=1e-10)
    path.unlink()
    assert fit("resume", epochs=2)[0][-1]["validation_loss"] == pytest.approx(expected, abs=1e-10)
    with pytest.raises(UsageError, match="no such file"):
        fit("fresh", epochs=1)
