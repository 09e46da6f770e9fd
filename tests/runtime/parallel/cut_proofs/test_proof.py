"""User-written blocks cut over tp by layouts and rules: proved equal to one process, or refused in a clear line."""

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.parallel.context.context_parallel import Context
from quintsched.runtime.parallel.cut_proofs import twin_test_bench
from quintsched.runtime.parallel.cut_proofs.block_kinds import kind_of

from ....helpers.blocks import of_kind, of_layers
from .odd_blocks import HEADS, ODD, TOKENS, WIDTH, Attending, Mlp, attend
from .training import refusal, train, train_equal

PARTS_1 = {"*.qkv": {"cut": "column", "parts": 1}, "*.proj": "row"}
PARTS_211 = {"*.qkv": {"cut": "column", "parts": [2, 1, 1]}, "*.proj": "row"}
WHOLE = {"*.fc1": "replicate", "*.fc2": "replicate"}
SHIFT = torch.randn(4, TOKENS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("NeoX", PARTS_1),
        ("Phi3", PARTS_211),
        ("GatesInTurns", {"*.gate_up_proj": {"cut": "column", "parts": 1}}),
        ("SoftmaxBetween", WHOLE),
        ("Configured", {"*": "replicate"}),
        ("Configured", {"*.qkv": {"cut": "column", "sizes": ["num_heads", "cfg.n_heads"]}, "*.proj": "row"}),
    ],
)
def test_what_a_rule_cuts_equals_one_process(name: str, rules: dict[str, Any]) -> None:
    found = train_equal("tp=2", [ODD[name], Mlp], rules=rules)
    assert any(weight.startswith("0.") for weight in found.cut) != ("replicate" in rules.values())


class Zeroed(ODD["SoftmaxBetween"]):
    """Starts as the identity, so that its own weights would prove anything."""

    def has(self) -> dict[str, Any]:
        nn.init.zeros_(self.fc2.weight)
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("block", [Zeroed, *(ODD[name] for name in ("HalvesBetween", "SummedHeads"))])
def test_a_pair_that_looks_at_other_features_is_parted_or_refused_where_a_rule_wants_it(block, caplog):
    first, second = ("fc1", "fc2") if issubclass(block, Mlp) else ("qkv", "proj")
    found = train_equal("tp=2", [Mlp, block])
    assert {f"1.{first}.weight", f"1.{second}.weight"} <= found.cut
    assert str(found.engine.tensor_cuts).endswith(f"; one by one: 1.{first}, 1.{second}")
    where = f"'1.{first}' and '1.{second}'"
    assert f"block 1 ({block.__name__}): {where} are cut one by one over tp, since as a pair, " in caplog.text
    said = refusal("tp=2", [Mlp, block], rules={f"*.{first}": "column", f"*.{second}": "row"})
    advice = {f"*.{first}": "replicate", f"*.{second}": "replicate"}
    assert said.startswith(f"block 1 ({block.__name__}) over tp=2 cut at {where}: ")
    assert said.endswith(f"; keep them whole: rules={advice}")


@pytest.mark.slow
def test_sizes_in_what_a_module_was_built_from_are_divided() -> None:
    found = train_equal("tp=2", [ODD["Configured"], Mlp])
    assert "0.qkv.weight" in found.cut
    assert found.engine.stages[0].blocks["0"].cfg.n_heads == HEADS // 2


Shifted = of_kind(ODD["NeoX"], lambda self, x, shift: ODD["NeoX"].forward(self, x + shift[..., None]))
"""Wants something beside the tokens, so that nobody can try it before a batch comes."""


@pytest.mark.slow
def test_a_layout_that_only_a_batch_can_prove_is_parted_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    blocks, extras = [Mlp, Shifted], {"shift": SHIFT}
    assert "1.qkv.weight" in train_equal("tp=2", blocks, extras=extras).cut
    said = f"layers are cut one by one, since in pairs, .*{re.escape(f'with rules={PARTS_1}')}"
    assert re.search(said, caplog.text)
    said = refusal("tp=2", blocks, extras=extras, rules={"*.qkv": "column", "*.proj": "row"})
    assert said.endswith(f"their outputs are laid out otherwise: rules={PARTS_1}")


class Sloped(Mlp):
    """A weight between the layers, and what joins features where an extra is given."""

    def has(self) -> dict[str, Any]:
        return {"slope": nn.Parameter(torch.ones(()))}

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.fc1(x) * self.slope
        return x + self.fc2(y if shift is None else y.softmax(-1))


@pytest.mark.parametrize(
    ("name", "rules", "right"), [("Fused", PARTS_1, 3), ("NeoX", {"*.qkv": {"cut": "column", "parts": 3}}, 1)]
)
def test_a_rule_that_says_the_wrong_layout_is_refused(name: str, rules: Any, right: int) -> None:
    said = refusal("tp=2", [ODD[name]], rules=rules)
    assert f"rules={{'*.qkv': {{'cut': 'column', 'parts': {right}}}, '*.proj': 'row'}}" in said


RULES: list[tuple[Any, str]] = [
    ({"cut": "column", "parts": 0}, "parts are a number of equal blocks or a list of proportions, not 0"),
    ({"cut": "row", "parts": 2}, "only a column has parts, not 'row'"),
    ({"cut": "colum"}, "unknown split 'colum'; did you mean 'column'"),
    ({"cut": "vocabulary", "alone": True}, "a column or a row can be alone, not 'vocabulary'"),
    ({"cut": "row", "alone": 1}, "alone is true or false, not 1"),
    ({"cut": "column", "sizes": "num_heads"}, "sizes are a list of names of attributes, not 'num_heads'"),
    ({"split": "column"}, "unknown key 'split'; a rule has 'cut', 'parts', 'sizes' and 'alone'"),
]
UNMATCHED: list[tuple[str, Any, str]] = [
    ("tp=2", {"rules": {"*.fc3": "replicate"}}, "rule '*.fc3' is for no layer of the model; did you mean"),
    ("pp=1", {"rules": {"0": "replicate"}}, "rule '0' is for no layer of the model; did you mean '0.*'"),
    ("pp=1", {"extras": {"shift": SHIFT, "shif": SHIFT}}, "no block takes 'shif', which the step is given; did"),
    *(("tp=2", {"rules": {"*.fc1": rule}}, f"*.fc1: {words}") for rule, words in RULES),
]


@pytest.mark.parametrize(("mesh", "more", "words"), UNMATCHED)
def test_rules_and_extras_that_say_nothing_or_match_nothing_are_refused(mesh: str, more: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        train(mesh, [Sloped], **more)


NeoX, Timm = ODD["NeoX"], ODD["Fused"]


@pytest.mark.slow
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


Blind = of_layers(
    "Blind", lambda: {"first": Attending(), "second": Attending()}, lambda self, x: self.second(self.first(x))
)
"""Two attentions, neither of which sees the whole sequence."""


def half_seeing(self: Any, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
    return self.second(self.first(x, past=past, context=context))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "more", "name"), [("cp=2", {}, "context"), ("pp=2", {"schedule": "seq-1f1b", "slices": 2}, "past")]
)
def test_every_attention_is_asked_for_the_whole_sequence(mesh: str, more: dict[str, Any], name: str) -> None:
    train_equal(mesh, [Attending, Mlp], **more)
    half = of_kind(Blind, half_seeing)
    for block, why in ((half, "not all of its attentions use"), (Blind, "its forward does not take")):
        said = refusal(mesh, [Attending, Mlp, block], **more)
        assert re.search(rf"block 2 \(Blind\).* gives other numbers .*{why} `{name}`", said)


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


@pytest.mark.slow
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
        return x + self.fc2(y.softmax(-1) if self.layer_idx else nn.functional.gelu(y))


@pytest.mark.slow
def test_blocks_that_do_something_else_by_their_place_are_proved_apart() -> None:
    train_equal("tp=2", [lambda: Placed(None, 0), lambda: Placed(None, 1)])


class Noisy(Mlp):
    """Draws where no dropout does, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.counted(x)) + 0 * torch.randn(1, dtype=x.dtype, device=x.device)


@pytest.mark.slow
def test_a_proof_leaves_generators_and_statistics_alone() -> None:
    state = torch.get_rng_state()
    train_equal("tp=2", [Noisy])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_pair_that_only_a_batch_shows_to_be_none_is_refused_where_gradients_in_it_are_summed() -> None:
    said = refusal("tp=2", [Sloped, Mlp], extras={"shift": torch.zeros_like(SHIFT)})
    assert said.endswith(f"keep them whole: rules={WHOLE}")


class Whole(nn.Module):
    """An attention that says nowhere that it is one, and a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        fused = self.into(x).unflatten(-1, (3, 2, -1))
        return self.mlp(x + self.back(attend(*fused.unbind(2))))


@pytest.mark.slow
def test_attentions_that_are_kept_whole_get_whole_tokens(caplog: pytest.LogCaptureFixture) -> None:
    engine = train_equal("tp=2", [Mlp, Whole], sequence_parallel=True).engine
    assert [engine._model.tensor.tokens.inside(number) for number in range(2)] == [True, False]
    assert "block 1 (Whole) is given whole tokens under sequence_parallel, since with slices, " in caplog.text


@pytest.mark.slow
def test_the_rule_that_is_named_for_blocks_that_are_layers_cuts_them() -> None:
    blocks = [functools.partial(nn.Linear, WIDTH, WIDTH), Mlp, functools.partial(nn.Linear, WIDTH, WIDTH)]
    said = str(train("tp=2", blocks)[0].engine.tensor_cuts)
    rules = {"0": "column", "2": "column"}
    assert f"in no pair (a rule would cut them: rules={rules}): 0,2" in said
    found = train_equal("tp=2", blocks, rules=rules)
    assert {"0.weight", "2.weight"} <= found.cut
    assert "in no pair" not in str(found.engine.tensor_cuts)
