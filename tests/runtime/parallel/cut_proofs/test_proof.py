"""Proofs of user-written blocks before they are cut over tp, cp, slices and tokens, and how often they run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, moe_gpt
from quintsched.runtime.parallel.context.context_parallel import Context
from quintsched.runtime.parallel.cut_proofs import twin_test_bench
from quintsched.runtime.parallel.cut_proofs.block_kinds import kind_of
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...toys import ids_task, sgd
from .odd_blocks import HEADS, ODD, TOKENS, WIDTH, Mlp, attend
from .training import batch, loss, refusal, train, train_equal

NeoX, Timm = ODD["NeoX"], ODD["Fused"]


def test_each_kind_is_proved_once_and_says_what_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    whole = twin_test_bench.run_whole

    def counted(block: nn.Module, arrival: Any) -> Any:
        runs.append(type(block).__name__)
        return whole(block, arrival)

    monkeypatch.setattr(twin_test_bench, "run_whole", counted)
    engine = train("tp=2", [Mlp, Timm, Mlp, Mlp])[0].engine
    # on two ranks: built, in training; in the first step, twice
    assert sorted(runs) == ["Fused"] * 8 + ["Mlp"] * 8
    proved = "pairs proved for all inputs: 0,2-3.fc1, 1.qkv"
    assert engine.tensor_cuts == f"tp=2 cuts 12 of 24 weights; whole: only norms and biases; {proved}"
    runs.clear()
    train("tp=2", [Mlp, Timm], prove="none")
    assert runs == []


LLAMA = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "kv_heads": 2}


BUILT_IN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("tp=2", {}, {}),
    ("tp=2", LLAMA, {"sequence_parallel": True}),
    ("cp=2,tp=2", {}, {"context": "gather", "sequence_parallel": True}),
    ("ep=2,tp=2", {"experts": 4, "top_k": 2}, {}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mesh", "model", "more"), BUILT_IN)
def test_built_in_blocks_prove_too_and_run_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, mesh: str, model: dict[str, Any], more: dict[str, Any]
) -> None:
    data, runs, cut = DataSpec(input_shape=(16,), num_classes=10), list[object](), twin_test_bench.run_cut
    build, options = (moe_gpt, MoEGPTOptions) if "experts" in model else (gpt, GPTOptions)
    blocks = build(data, options(hidden=16, depth=2, heads=4, **model))
    monkeypatch.setattr(twin_test_bench, "run_cut", lambda *args: runs.append(args) or cut(*args))
    task = ids_task(1, 8, 16)
    given = {"microbatches": 4, "loss_fn": cross_entropy_sum, **more}
    train(mesh, blocks, [(task.inputs[0], task.targets[0])], prove="all", **given)
    assert runs  # what differs would be refused
    runs.clear()
    train(mesh, blocks, [(task.inputs[0], task.targets[0])], **given)
    assert not runs


class Noisy(Mlp):
    """Draws where no dropout does, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.counted(x)) + 0 * torch.randn(1, dtype=x.dtype, device=x.device)


def test_a_proof_leaves_generators_and_statistics_alone() -> None:
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    plan = qs.compile("gpipe", mesh="tp=2", microbatches=2)

    def run(transport: Transport) -> bool:
        engine = Engine(plan, [Noisy], loss, sgd, transport=transport, dtype=torch.float64)
        given = engine._model.batches(plan, *batch(1), {})
        state = torch.get_rng_state()
        engine._runner.prepare(plan, given)
        engine.everyone.barrier()
        assert torch.equal(torch.get_rng_state(), state)
        return bool(engine.stages[0].get_buffer("blocks.0.counted.running_mean").any())

    assert run_local(2, run) == [False, False]
    assert torch.equal(torch.randn(4), expected)


class Whole(nn.Module):
    """An attention that says nowhere that it is one, and a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        fused = self.into(x).unflatten(-1, (3, 2, -1))
        out: Tensor = self.mlp(x + self.back(attend(*fused.unbind(2))))
        return out


@pytest.mark.sampled(1)
def test_attentions_that_are_kept_whole_get_whole_tokens(caplog: pytest.LogCaptureFixture) -> None:
    engine = train_equal("tp=2", [Mlp, Whole], sequence_parallel=True).engine
    assert [engine._model.tensor.tokens.inside(number) for number in range(2)] == [True, False]
    assert "block 1 (Whole) is given whole tokens under sequence_parallel, since with slices, " in caplog.text


class Seeing(nn.Module):
    """Two attentions, of which one sees the whole sequence; or both, or a product of neighbours."""

    both = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        x = x + self.attend(self.first, x, past, context)
        return x + (self.attend(self.second, x, past, context) if self.both else self.attend(self.second, x))

    def attend(self, layer: nn.Module, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if context is not None:
            return context.attend(q, k, v).transpose(1, 2).flatten(2)
        k, v = (k, v) if past is None else past.extend(layer, k, v)
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


class HalfSeeing(Seeing):
    both = False


class Blind(Seeing):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "more", "name"), [("cp=2", {}, "context"), ("pp=2", {"schedule": "seq-1f1b", "slices": 2}, "past")]
)
def test_every_attention_is_asked_for_the_whole_sequence(mesh: str, more: dict[str, Any], name: str) -> None:
    train_equal(mesh, [Seeing, Mlp], **more)
    for block, why in ((HalfSeeing, "not all of its attentions use"), (Blind, "its forward does not take")):
        said = refusal(mesh, [Seeing, Mlp, block], **more)
        assert re.search(rf"block 2 \({block.__name__}\).* gives other numbers .*{why} `{name}`", said)


class Uncopied(Mlp):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("there is one of it")


def test_blocks_that_cannot_be_copied_are_built_again_or_kept_whole_or_refused() -> None:
    assert "0.fc1.weight" in train_equal("tp=2", [Uncopied, Timm]).cut
    with pytest.raises(MisfitError, match=r"block 0 \(Uncopied\) cannot be copied: there is one of it; .* a function"):
        train("tp=2", [Uncopied()])
    built = Uncopied()
    with pytest.raises(MisfitError, match=r"block 0 \(Uncopied\) cannot be copied"):
        train("tp=2", [lambda: built])


def test_functions_that_build_around_one_weight_are_found() -> None:
    mlp, weight = Mlp(), nn.Parameter(torch.zeros(32, WIDTH))

    def tied() -> nn.Module:
        block = Mlp()
        block.fc1.weight = weight
        return block

    for blocks in ([lambda: mlp, lambda: mlp], [tied, Mlp, tied]):
        for mesh in ("tp=2", "pp=2"):
            with pytest.raises(MisfitError, match=r"blocks 0 and \d share the weight 'fc1.weight'|'norm.weight'"):
                train(mesh, blocks)


class Alone(ODD["SoftmaxBetween"]):
    """Cannot be run by others than a step: it wants to be in training."""

    def between(self, y: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("never evaluated")
        return super().between(y)


def test_what_nobody_can_prove_is_parted(caplog: pytest.LogCaptureFixture) -> None:
    assert "1.fc1.weight" in train_equal("tp=2", [Mlp, Alone]).cut
    assert "block 1 (Alone) over tp=2: layers are cut one by one: it is not proved" in caplog.text


class Told(Mlp):
    """A block that is told something."""

    def __init__(self, told: Any, layer_idx: int = 0) -> None:
        super().__init__()
        self.told, self.layer_idx = told, layer_idx


def bound(number: int) -> Callable[[], int]:
    return lambda: number


TOLD: list[Callable[[int], Any]] = [
    lambda i: {"n": [float(i)]},
    lambda i: SimpleNamespace(n=i),
    bound,
    lambda i: functools.partial(max, 0, i),
    lambda i: np.array([i]),
    lambda i: torch.tensor(i),
    lambda i: bytearray([i]),
    lambda i: {i},
    lambda i: [nn.Dropout(i), nn.Softmax(i)],
]


def test_blocks_are_of_one_kind_where_all_that_they_are_told_is_equal() -> None:
    for told in TOLD:
        first, again, other = (kind_of(Told(told(i), k), [], str(k)) for k, i in enumerate((0, 0, 1)))
        assert first[0] == again[0] != other[0]
        assert (first[1], again[1]) == ((0,), (1,))


class Placed(Told):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return x + self.fc2(y.softmax(-1) if self.layer_idx else F.gelu(y))  # type: ignore[no-any-return]


def test_blocks_that_do_something_else_by_their_place_are_proved_apart() -> None:
    train_equal("tp=2", [lambda: Placed(None, 0), lambda: Placed(None, 1)])
