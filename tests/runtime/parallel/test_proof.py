"""Blocks as users write them, cut over tp, cp, slices and tokens: equal to one process, or refused in a clear line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.blocks.blocks import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.models.moe_gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.parallel.context.context import Context
from quintsched.runtime.parallel.proof import bench
from quintsched.runtime.parallel.tensor.shard import shard_of

from ..toys import ids_task, sgd, train_on

WIDTH, HEADS, TOKENS, SAMPLES = 16, 4, 8, 4
SIZE = WIDTH // HEADS
X = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """(samples, tokens, heads, size) to (samples, tokens, heads * size)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more).transpose(1, 2).flatten(2)
    )


class SelfAttention(nn.Module):
    """What all of them have; `heads` is told by the count, which a cut divides."""

    outputs = 3 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, self.outputs), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.mix(self.qkv(self.norm(x))))  # type: ignore[no-any-return]

    def mix(self, fused: Tensor) -> Tensor:
        raise NotImplementedError


class NeoX(SelfAttention):
    """(heads, 3, size), as GPT-NeoX and BLOOM have it."""

    def mix(self, fused: Tensor) -> Tensor:
        return attend(*fused.unflatten(-1, (self.num_heads, 3, -1)).unbind(3))


class Timm(SelfAttention):
    """(3, heads, size), as timm has it."""

    def mix(self, fused: Tensor) -> Tensor:
        return attend(*fused.unflatten(-1, (3, self.num_heads, -1)).unbind(2))


class MegatronGroups(SelfAttention):
    """(groups, heads of a group + 2, size), as Megatron has queries that share keys."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        groups = fused.unflatten(-1, (-1, 4, SIZE))
        q, k, v = groups.split((2, 1, 1), -2)
        return attend(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))


class Phi3(SelfAttention):
    """[q; k; v] with fewer heads of keys and values."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, SIZE)) for t in fused.split([n * fused.shape[-1] // 4 for n in (2, 1, 1)], -1))
        return attend(q, k, v)


class TalkingHeads(Timm):
    """Heads are mixed between the pair."""

    def mix(self, fused: Tensor) -> Tensor:
        return super().mix(fused).unflatten(-1, (self.num_heads, -1)).cumsum(2).flatten(2)


class Configured(SelfAttention):
    """Heads are counted where no cut sees it: `view(b, t, cfg.n_heads, -1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(n_heads=HEADS)

    def mix(self, fused: Tensor) -> Tensor:
        b, t, _ = fused.shape
        return attend(*(part.view(b, t, self.cfg.n_heads, -1) for part in fused.chunk(3, -1)))


class Mlp(nn.Module):
    outputs = 32

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, self.outputs), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.dropout(self.between(self.fc1(self.norm(x)))))  # type: ignore[no-any-return]

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class Softmax(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class Normalised(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.normalize(y, dim=-1)


class Swapped(Mlp):
    def between(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat((second, first), -1)


class Gates(nn.Module):
    """[gate; up] in one product, as timm's packed SwiGLU and Phi-3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.split(self.gate_up(x))
        return x + self.fc2(F.silu(gate) * up)  # type: ignore[no-any-return]

    def split(self, both: Tensor) -> tuple[Tensor, ...]:
        return both.chunk(2, -1)


class InterleavedGates(Gates):
    def split(self, both: Tensor) -> tuple[Tensor, ...]:
        return both.unflatten(-1, (-1, 2)).unbind(-1)


class Biased(NeoX):
    """Wants something beside the tokens, so that nobody can try it before a batch comes."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift[..., None])


class Zeroed(Softmax):
    """Starts as the identity, so that its own weights would prove anything."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.fc2.weight)


def trained_alone(blocks: Blocks, extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model = build_model(blocks, 0, torch.float64)
    stepper = sgd(list(model.parameters()))
    for _ in range(2):
        stepper.zero_grad()
        output = X
        for block in model:
            output = block(output, **{name: extra for name, extra in extras.items() if type(block) is Biased})
        (F.mse_loss(output, Y, reduction="sum") / (SAMPLES * TOKENS)).backward()
        stepper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, targets, reduction="sum"), torch.tensor(output.numel() / WIDTH, dtype=torch.float64)


def train(
    mesh: str, blocks: Blocks, *, schedule: str = "gpipe", extras: Mapping[str, Tensor] | None = None, **more: Any
) -> tuple[dict[str, Tensor], set[str], Engine]:
    """Train on a mesh; return all weights, the names of those that are cut, and the engine of the first rank."""
    slices = more.pop("slices", None)
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **({} if slices is None else {"slices": slices}))

    def run(transport: Transport) -> tuple[dict[str, Tensor], set[str], Engine]:
        engine = Engine(plan, blocks, loss, sgd, transport=transport, dtype=torch.float64, **more)
        for _ in range(2):
            engine.step(X, Y, **(extras or {}))
        cut = {n for stage in engine.stages.values() for n, p in stage.named_weights().items() if shard_of(p)}
        return engine.full_weights(), cut, engine

    ranks = run_local(plan.mesh.size, run)
    weights = {name: weight for rank in ranks for name, weight in rank[0].items()}
    return weights, set().union(*(rank[1] for rank in ranks)), ranks[0][2]


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name


PARTS_1 = {"*.qkv": {"cut": "column", "parts": 1}, "*.proj": "row"}
PARTS_211 = {"*.qkv": {"cut": "column", "parts": [2, 1, 1]}, "*.proj": "row"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (NeoX, {}),
        (NeoX, PARTS_1),
        (Timm, {}),
        (MegatronGroups, {}),
        (MegatronGroups, PARTS_1),
        (Phi3, {}),
        (Phi3, PARTS_211),
        (Mlp, {}),
        (Gates, {}),
        (InterleavedGates, {}),
        (InterleavedGates, {"*.gate_up": {"cut": "column", "parts": 1}}),
        (Softmax, {"*.fc1": "replicate", "*.fc2": "replicate"}),
        (Configured, {"*": "replicate"}),
    ],
)
def test_what_is_cut_equals_one_process(block: type[nn.Module], rules: Mapping[str, Any]) -> None:
    blocks = [block, Mlp, block]
    weights, cut, _ = train("tp=2", blocks, rules=rules)
    require_equal(weights, trained_alone(blocks, {}))
    assert any(name.startswith("0.") for name in cut) != ("replicate" in rules.values())


def refusal(mesh: str, blocks: Blocks, **more: Any) -> str:
    with pytest.raises(MisfitError) as caught:
        train(mesh, blocks, **more)
    return str(caught.value).removesuffix("\non rank 0 of 2")


PAIRS = {"fc": {"*.fc1": "column", "*.fc2": "row"}, "qkv": {"*.qkv": "column", "*.proj": "row"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("block", "where", "advice"),
    [
        (Softmax, "'1.fc1' and '1.fc2'", "{'*.fc1': 'replicate', '*.fc2': 'replicate'}"),
        (Zeroed, "'1.fc1' and '1.fc2'", "{'*.fc1': 'replicate', '*.fc2': 'replicate'}"),
        (Normalised, "'1.fc1' and '1.fc2'", "{'*.fc1': 'replicate', '*.fc2': 'replicate'}"),
        (Swapped, "'1.fc1' and '1.fc2'", "{'*.fc1': 'replicate', '*.fc2': 'replicate'}"),
        (TalkingHeads, "'1.qkv' and '1.proj'", "{'*.qkv': 'replicate', '*.proj': 'replicate'}"),
    ],
)
def test_a_pair_that_looks_at_other_features_is_parted_or_refused_where_a_rule_wants_it(
    block: type[nn.Module], where: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = [Mlp, block, Mlp]
    weights, cut, engine = train("tp=2", blocks)
    require_equal(weights, trained_alone(blocks, {}))
    assert {name for name in cut if name.startswith("1.")}
    assert str(engine.tensor_cuts).endswith(f"; one by one: {advice_names(advice)}")
    assert f"block 1 ({block.__name__}): {where} are cut one by one over tp, for as a pair, " in caplog.text
    said = refusal("tp=2", blocks, rules=PAIRS["fc" if "fc1" in where else "qkv"])
    found = rf"block 1 \({block.__name__}\) over tp=2 cut at {re.escape(where)}: .*; keep them whole: rules=(.*)"
    match = re.fullmatch(found, said)
    assert match is not None, said
    assert match[1] == advice
    blocks = [Timm, block]
    weights, _, _ = train(
        "tp=2", blocks, rules={f"1.{name[2:]}": "replicate" for name in re.findall(r"\*\.\w+", advice)}
    )
    require_equal(weights, trained_alone(blocks, {}))


def advice_names(advice: str) -> str:
    return ", ".join(f"1.{name[2:]}" for name in re.findall(r"\*\.\w+", advice))


def test_sizes_in_what_a_module_was_built_from_are_divided() -> None:
    for rules in ({}, {"*.qkv": {"cut": "column", "sizes": ["num_heads", "cfg.n_heads"]}, "*.proj": "row"}):
        weights, cut, engine = train("tp=2", [Configured, Mlp], rules=rules)
        require_equal(weights, trained_alone([Configured, Mlp], {}))
        assert "0.qkv.weight" in cut
        assert engine.stages[0].blocks["0"].cfg.n_heads == HEADS // 2


def test_a_layout_that_only_a_batch_can_prove_is_parted_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    shift = torch.randn(SAMPLES, TOKENS, dtype=torch.float64)
    rules = {"*.qkv": {"cut": "column", "parts": 1}, "*.proj": "row"}
    weights, cut, _ = train("tp=2", [Mlp, Biased], extras={"shift": shift})
    require_equal(weights, trained_alone([Mlp, Biased], {"shift": shift}))
    assert "1.qkv.weight" in cut
    assert re.search(rf"its layers are cut one by one, for in pairs, .*{re.escape(f'with rules={rules}')}", caplog.text)
    said = refusal("tp=2", [Mlp, Biased], extras={"shift": shift}, rules={"*.qkv": "column", "*.proj": "row"})
    assert said.endswith(f"their outputs are laid out otherwise: rules={rules}")
    weights, cut, _ = train("tp=2", [Mlp, Biased], extras={"shift": shift}, rules=rules)
    require_equal(weights, trained_alone([Mlp, Biased], {"shift": shift}))
    assert "1.qkv.weight" in cut


def test_a_rule_that_says_the_wrong_layout_is_refused() -> None:
    said = refusal("tp=2", [Timm], rules=PARTS_1)
    assert "rules={'*.qkv': {'cut': 'column', 'parts': 3}, '*.proj': 'row'}" in said
    said = refusal("tp=2", [NeoX], rules={"*.qkv": {"cut": "column", "parts": 3}})
    assert "rules={'*.qkv': {'cut': 'column', 'parts': 1}, '*.proj': 'row'}" in said


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"cut": "column", "parts": 0}, "parts are a number of equal blocks or a list of proportions, not 0"),
        ({"cut": "row", "parts": 2}, "only a column has parts, not 'row'"),
        ({"cut": "colum"}, "unknown split 'colum'; did you mean 'column'"),
        ({"cut": "vocabulary", "alone": True}, "a column or a row can be alone, not 'vocabulary'"),
        ({"cut": "row", "alone": 1}, "alone is true or false, not 1"),
        ({"cut": "column", "sizes": "num_heads"}, "sizes are a list of names of attributes, not 'num_heads'"),
        ({"split": "column"}, "unknown key 'split'; a rule has 'cut', 'parts', 'sizes' and 'alone'"),
    ],
)
def test_rules_that_say_nothing_that_there_is(rule: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"tensor-parallel rule '*.qkv': {words}")):
        train("tp=2", [Timm], rules={"*.qkv": rule})


def test_rules_and_extras_that_match_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rule '\*.fc3' is for no layer of the model; did you mean"):
        train("tp=2", [Mlp], rules={"*.fc3": "replicate"})
    with pytest.raises(UsageError, match=r"rule '0' is for no layer of the model; did you mean '0.\*'"):
        train("pp=1", [Mlp], rules={"0": "replicate"})
    shift = torch.randn(SAMPLES, TOKENS, dtype=torch.float64)
    with pytest.raises(UsageError, match="no block takes 'shif', which the step is given; did you mean 'shift'"):
        train("pp=1", [Biased], extras={"shift": shift, "shif": shift})


def test_each_kind_is_proved_once_and_says_what_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    whole = bench.run_whole

    def counted(block: nn.Module, arrival: Any) -> Any:
        runs.append(type(block).__name__)
        return whole(block, arrival)

    monkeypatch.setattr(bench, "run_whole", counted)
    _, _, engine = train("tp=2", [Mlp, Timm, Mlp, Mlp, Timm])
    assert sorted(runs) == ["Mlp"] * 4 + ["Timm"] * 4  # on two ranks: when it is built, and in the first step
    assert engine.tensor_cuts == "tp=2 cuts 15 of 30 weights; whole: only norms and biases"
    runs.clear()
    train("tp=2", [Mlp, Timm], prove="none")
    assert runs == []


def count_proofs(monkeypatch: pytest.MonkeyPatch, blocks: Blocks, mesh: str, schedule: str, **more: Any) -> int:
    """Return how many kinds of blocks are run cut on all ranks; what differs would be refused."""
    runs: list[object] = []
    cut = bench.run_cut
    monkeypatch.setattr(bench, "run_cut", lambda *args: runs.append(args) or cut(*args))
    slices = more.pop("slices", None)
    plan = qs.compile(schedule, mesh=mesh, microbatches=4, **({} if slices is None else {"slices": slices}))
    task = ids_task(1, 8, 16)
    train_on(plan, task, blocks, dtype=torch.float64, **more)
    return len(runs)


LLAMA = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "kv_heads": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "schedule", "model", "more"),
    [
        ("tp=2", "1f1b", {}, {}),
        ("tp=2", "1f1b", LLAMA, {"sequence_parallel": True}),
        ("cp=2", "1f1b", LLAMA, {}),
        ("cp=2,tp=2", "gpipe", {}, {"context": "gather", "sequence_parallel": True}),
        ("tp=2,pp=2", "seq-1f1b", LLAMA, {"slices": 2}),
        ("ep=2,tp=2", "1f1b", {"experts": 4, "top_k": 2}, {}),
        ("tp=2,pp=2", "dualpipe", {}, {}),
    ],
)
def test_built_in_blocks_prove_too_and_run_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, mesh: str, schedule: str, model: dict[str, Any], more: dict[str, Any]
) -> None:
    data = DataSpec(input_shape=(16,), num_classes=10)
    blocks = (
        moe_gpt(data, MoEGPTOptions(hidden=16, depth=2, heads=4, **model))
        if "experts" in model
        else gpt(data, GPTOptions(hidden=16, depth=2, heads=4, **model))
    )
    assert count_proofs(monkeypatch, blocks, mesh, schedule, prove="all", **more) > 0
    if mesh == "tp=2":
        assert count_proofs(monkeypatch, blocks, mesh, schedule, **more) == 0


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

    def run(transport: Transport) -> tuple[Tensor, Tensor]:
        engine = Engine(plan, [Noisy], loss, sgd, transport=transport, dtype=torch.float64)
        batch = engine._model.batches(plan, X, Y, {})
        state = torch.get_rng_state()
        engine._runner.prepare(plan, batch)
        engine.everyone.barrier()
        assert torch.equal(torch.get_rng_state(), state)
        return engine.stages[0].get_buffer("blocks.0.counted.running_mean"), torch.tensor(0)

    for mean, _ in run_local(2, run):
        assert not mean.any()
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


class WholeShifted(Whole):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift[..., None])


def test_attentions_that_are_kept_whole_get_whole_tokens_or_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    blocks: list[type[nn.Module]] = [Mlp, Whole, Mlp]
    weights, _, engine = train("tp=2", blocks, sequence_parallel=True)
    require_equal(weights, trained_alone(blocks, {}))
    assert [engine._model.tensor.tokens.inside(number) for number in range(3)] == [True, False, True]
    assert "block 1 (Whole) is given whole tokens under sequence_parallel, for with slices, " in caplog.text
    shift = torch.randn(SAMPLES, TOKENS, dtype=torch.float64)
    said = refusal("tp=2", [Mlp, WholeShifted], sequence_parallel=True, extras={"shift": shift})
    assert "block 1 (WholeShifted) over tp=2 is given a slice of the tokens by sequence_parallel, and " in said
    blocks = [Mlp, NeoX]
    weights, _, _ = train("tp=2", blocks, sequence_parallel=True)
    require_equal(weights, trained_alone(blocks, {}))


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


CUTS: list[tuple[str, dict[str, Any], str]] = [
    ("cp=2", {}, "context"),
    ("cp=2,tp=2", {"context": "gather"}, "context"),
    ("pp=2", {"schedule": "seq-1f1b", "slices": 2}, "past"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mesh", "more", "name"), CUTS)
def test_every_attention_is_asked_for_the_whole_sequence(mesh: str, more: dict[str, Any], name: str) -> None:
    more = {"schedule": "1f1b", **more}
    blocks: list[Callable[[], nn.Module]] = [Seeing, Mlp, Seeing]
    weights, _, _ = train(mesh, blocks, **more)
    require_equal(weights, trained_alone(blocks, {}))
    for block, why in ((HalfSeeing, "not all of its attentions use"), (Blind, "its forward does not take")):
        with pytest.raises(MisfitError, match=rf"block 2 \({block.__name__}\).* gives other numbers .*{why} `{name}`"):
            train(mesh, [Seeing, Mlp, block], **more)


class Uncopied(Mlp):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("there is one of it")


def test_blocks_that_cannot_be_copied_are_built_again_or_kept_whole_or_refused() -> None:
    weights, cut, _ = train("tp=2", [Uncopied, Timm])
    require_equal(weights, trained_alone([Uncopied, Timm], {}))
    assert "0.fc1.weight" in cut
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


class Alone(Softmax):
    """Cannot be run by others than a step: it wants to be in training."""

    def between(self, y: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("never evaluated")
        return super().between(y)


def test_what_nobody_can_prove_is_parted(caplog: pytest.LogCaptureFixture) -> None:
    weights, cut, _ = train("tp=2", [Mlp, Alone])
    require_equal(weights, trained_alone([Mlp, Alone], {}))
    assert "1.fc1.weight" in cut
    assert "block 1 (Alone) over tp=2: its layers are cut one by one, for it is not proved" in caplog.text
