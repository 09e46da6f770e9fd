"""Blocks as users write them, cut over tp by layouts and rules: equal to one process, or refused in a clear line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import UsageError

from .odd_blocks import HEADS, ODD, TOKENS, WIDTH, Mlp
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


class Zeroed(ODD["SoftmaxBetween"]):  # type: ignore[misc]
    """Starts as the identity, so that its own weights would prove anything."""

    def has(self) -> dict[str, Any]:
        nn.init.zeros_(self.fc2.weight)
        return {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "block", [Zeroed, *(ODD[name] for name in ("NormalisedBetween", "HalvesBetween", "SummedHeads"))]
)
def test_a_pair_that_looks_at_other_features_is_parted_or_refused_where_a_rule_wants_it(
    block: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
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


class Rows(nn.Module):
    """Layers without names, and products that are added to those of another layer, as LoRA does it."""

    def __init__(self) -> None:
        super().__init__()
        mlp = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.net = nn.Sequential(*mlp, nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH), nn.Softmax(-1), nn.Linear(2 * WIDTH, 4))
        self.layer, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.layer.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) + self.second(self.first(x) + self.net(x))


class LowRank(nn.Module):
    """A product of two thin layers, under the names that PEFT has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lora_b(self.lora_a(x))


def test_layers_in_a_row_are_pairs_and_what_is_in_none_is_said_and_cut_by_rules_alone() -> None:
    found = train_equal("tp=2", [Rows, LowRank], rules={"*.lora_a": "column", "*.lora_b": "row"})
    assert {*(f"0.net.{number}.weight" for number in (0, 2, 4, 6)), "1.lora_a.weight"} <= found.cut
    rule = "in no pair (a rule would cut them: rules={'*.layer': 'column'})"
    said = str(found.engine.tensor_cuts)
    assert f"whole: 0.layer, 0.first, 0.second; {rule}: 0.layer, 0.first, 0.second; " in said
    assert said.endswith("one by one: 0.net.4, 0.net.6")


def test_sizes_in_what_a_module_was_built_from_are_divided() -> None:
    found = train_equal("tp=2", [ODD["Configured"], Mlp])
    assert "0.qkv.weight" in found.cut
    assert found.engine.stages[0].blocks["0"].cfg.n_heads == HEADS // 2


class Shifted(ODD["NeoX"]):  # type: ignore[misc]
    """Wants something beside the tokens, so that nobody can try it before a batch comes."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x + shift[..., None])  # type: ignore[no-any-return]


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


def test_a_pair_that_only_a_batch_shows_to_be_none_is_refused_where_gradients_in_it_are_summed() -> None:
    said = refusal("tp=2", [Sloped, Mlp], extras={"shift": torch.zeros_like(SHIFT)})
    assert said.endswith(f"keep them whole: rules={WHOLE}")


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_block_with_a_module_of_torch_script_is_refused() -> None:
    class Scripted(Mlp):
        def has(self) -> dict[str, Any]:
            return {"act": torch.jit.script(nn.Tanh())}

    assert "'0.act' is a module of torch.jit.script" in refusal("tp=2", [Scripted])
