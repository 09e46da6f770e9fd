"""Blocks as users write them, cut over tp by layouts and rules: equal to one process, or refused in a clear line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import UsageError

from .user_blocks import (
    HEADS,
    SAMPLES,
    TOKENS,
    WIDTH,
    Biased,
    Configured,
    Gates,
    InterleavedGates,
    MegatronGroups,
    Mlp,
    NeoX,
    Normalised,
    Phi3,
    Softmax,
    Swapped,
    TalkingHeads,
    Timm,
    Zeroed,
    refusal,
    require_equal,
    train,
    trained_alone,
)

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


class Rows(nn.Module):
    """Layers without names, and products that are added to those of another layer, as LoRA does it."""

    def __init__(self) -> None:
        super().__init__()
        mlp = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.net = nn.Sequential(*mlp, nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH), nn.Softmax(-1), nn.Linear(2 * WIDTH, 4))
        self.layer, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.layer.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.second(self.first(x) + self.net(x))
        return x + found


class LowRank(nn.Module):
    """A product of two thin layers, under the names that PEFT has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lora_b(self.lora_a(x))


def test_a_pair_under_the_names_of_adapters_may_be_cut_by_a_rule() -> None:
    blocks: list[type[nn.Module]] = [Mlp, LowRank]
    weights, cut, _ = train("tp=2", blocks, rules={"*.lora_a": "column", "*.lora_b": "row"})
    require_equal(weights, trained_alone(blocks, {}))
    assert any(name.startswith("1.lora_a") for name in cut)


def test_layers_in_a_row_are_pairs_and_what_is_in_none_is_said() -> None:
    weights, cut, engine = train("tp=2", [Rows, Mlp])
    require_equal(weights, trained_alone([Rows, Mlp], {}))
    assert {f"0.net.{number}.weight" for number in (0, 2, 4, 6)} <= cut
    rule = "in no pair, so that a rule has to cut them, rules={'*.layer': 'column'}"
    assert f"whole: 0.layer, 0.first, 0.second; {rule}: 0.layer, 0.first, 0.second; " in str(engine.tensor_cuts)
    assert str(engine.tensor_cuts).endswith("one by one: 0.net.4, 0.net.6")


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


class Sloped(Mlp):
    """A weight between the layers, and what joins features where an extra is given."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.fc1(x) * self.slope
        y = y if shift is None else y.softmax(-1)
        return x + self.fc2(y)


def test_a_pair_that_only_a_batch_shows_to_be_none_is_refused_where_gradients_in_it_are_summed() -> None:
    shift = torch.zeros(SAMPLES, TOKENS, dtype=torch.float64)
    said = refusal("tp=2", [Sloped, Mlp], extras={"shift": shift})
    assert said.endswith("keep them whole: rules={'*.fc1': 'replicate', '*.fc2': 'replicate'}")


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
    with pytest.raises(UsageError, match=re.escape(f"rules.*.qkv: {words}")):
        train("tp=2", [Timm], rules={"*.qkv": rule})


def test_rules_and_extras_that_match_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rule '\*.fc3' is for no layer of the model; did you mean"):
        train("tp=2", [Mlp], rules={"*.fc3": "replicate"})
    with pytest.raises(UsageError, match=r"rule '0' is for no layer of the model; did you mean '0.\*'"):
        train("pp=1", [Mlp], rules={"0": "replicate"})
    shift = torch.randn(SAMPLES, TOKENS, dtype=torch.float64)
    with pytest.raises(UsageError, match="no block takes 'shif', which the step is given; did you mean 'shift'"):
        train("pp=1", [Biased], extras={"shift": shift, "shif": shift})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_block_with_a_module_of_torch_script_is_refused() -> None:
    class Scripted(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.jit.script(nn.Tanh())

    assert "'0.act' is a module of torch.jit.script" in refusal("tp=2", [Scripted])
