"""A loss or a metric that reads weights which other ranks train is refused on all ranks."""

import re
import weakref
from functools import lru_cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, run_local
from quintsched.runtime.guards.state_in_several_stages import SharedState
from quintsched.runtime.guards.weights_not_held import ReadsElsewhere, WeightsElsewhere
from quintsched.runtime.parallel.tensor.parameter_shards import TpShard, mark_shard

from ...helpers.blocks import of_kind

READS = {
    "a norm": lambda m, y: y.sum() + m[0].weight.norm(),
    "all squares": lambda m, y: sum((p.pow(2).sum() for p in m.parameters()), y.sum()),
    "its forward": lambda m, y: m(y).sum(),
    "a slice, detached": lambda m, y: y.sum() + m[0].weight.detach()[0].sum(),
    "by state_dict": lambda m, y: y.sum() + m.state_dict()["0.bias"].sum(),
    "a list": lambda m, y: torch.cat([p.flatten() for p in m.parameters()]).sum(),
    "into Python": lambda m, y: y.sum() * m[0].bias[0].item(),
}
READS_NOT = {
    "shapes, devices": lambda m, y: y.sum() / m[0].weight.numel() + torch.zeros((), device=m[0].weight.device),
    "what is made like it": lambda m, y: m[0].weight.new_zeros(()) + torch.zeros_like(m[0].bias).sum() + y.sum(),
    "its own": lambda m, y: m[1].weight.norm() + m[1](y).sum(),
    "a frozen one": lambda m, y: m[2](y).sum(),
}


@pytest.mark.parametrize("name", [*READS, *READS_NOT])
def test_what_others_train_is_seen(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    weights = WeightsElsewhere(model)
    weights.settle_stages([nn.ModuleList([model[1]])], is_resident=True)
    reads = ReadsElsewhere(weights, "the loss")
    for _ in range(2):
        with reads:
            {**READS, **READS_NOT}[name](model, torch.ones(1, 2))
    assert ("the loss goes by '0." in reads.refusal) == (name in READS)


@pytest.mark.parametrize(("is_cut", "words"), [(True, "tp gives this rank a shard"), (False, "ZeRO-3 .* cannot read")])
def test_what_this_rank_has_a_shard_of_is_seen(is_cut, words):
    """Also where whole weights lie in one buffer with it."""
    model, buffer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), torch.ones(8)
    stage = nn.ModuleDict({str(number): module for number, module in enumerate(model)})
    for number, module in enumerate(model):
        module.weight.data = buffer[4 * number : 4 * number + 4].view(2, 2)
    weights = WeightsElsewhere(model)
    weights.settle_stages([stage], is_resident=is_cut)
    if is_cut:
        mark_shard(model[0].weight, TpShard(0, 1, 0, 2))
        with (whole := ReadsElsewhere(weights, "the loss")):
            model[1].weight.norm()
        assert not whole.refusal
    with (reads := ReadsElsewhere(weights, "the loss")):
        model[0].weight.detach()[1].norm()
    assert re.match(rf"the loss goes by '0.weight' .*{words}.*full_weights", reads.refusal)


@pytest.mark.parametrize("of", ["the loss", "metric"])
def test_all_ranks_refuse_it(of):
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def work(transport):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def norm(output, targets):
            return nn.functional.mse_loss(output, targets) + 0.1 * model[0].weight.pow(2).sum()

        functions = {"metrics": {"norm": norm}} if of == "metric" else {"loss_over": "microbatch"}
        loss = nn.functional.mse_loss if of == "metric" else norm
        engine = Engine(plan, model, loss, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport, **functions)
        before = model[transport.rank].weight.detach().clone()
        with pytest.raises(qs.MisfitError, match=rf"{of}.* goes by '0\.weight'.*weight_decay="):
            engine.step(torch.ones(4, 2), torch.ones(4, 2))
        assert torch.equal(before, model[transport.rank].weight)

    run_local(2, work)


ELSEWHERE = nn.Linear(2, 2)


class Reader(nn.Module):
    """A layer that may hold another stage's one."""

    def __init__(self, held=None):
        super().__init__()
        self.own, self.held = nn.Linear(2, 2), held

    def forward(self, x):
        return self.own(x)


ByName = of_kind(Reader, lambda self, x: self.own(x) @ ELSEWHERE.weight)
NamesAnAttribute = of_kind(Reader, lambda self, x: self.held.ELSEWHERE(self.own(x)))
"""Its code has an attribute called as something in its module is, and no more."""


def set_past_torch(other):
    reader = Reader()
    object.__setattr__(reader, "other", other)
    return reader


def hooked(other):
    reader = Reader()
    reader.register_forward_hook(lambda module, args, made: made @ other.weight)
    return reader


HOLDS = {
    "a list": lambda other: Reader([other]),
    "a weight": lambda other: Reader({"its": (other.weight,)}),
    "a parent": lambda other: Reader([nn.Sequential(other)]),
    "a closure": lambda other: Reader(lambda x: other(x)),
    "its forward": lambda other: Reader(other.forward),
    "a partial": lambda other: Reader(partial(nn.functional.linear, weight=other.weight)),
    "an object": lambda other: Reader(SimpleNamespace(other=other)),
    "set past torch": set_past_torch,
    "a hook": hooked,
    "a weak reference": lambda other: Reader(weakref.ref(other)),
    "a method of a weight": lambda other: Reader(other.weight.norm),
    "what is kept of calls": lambda other: Reader(lru_cache(lambda: other.weight.norm())),
    "without its gradient": lambda other: Reader([other.weight.detach()]),
    "a view": lambda other: Reader([other.weight.t()]),
    "a global": lambda other: ByName(),
}
HOLDS_NOT = {
    "its own": lambda other: Reader([nn.Linear(2, 2)]),
    "a frozen one": lambda other: Reader([other.requires_grad_(False)]),
    "a copy": lambda other: Reader([other.weight.detach().clone()]),
    "a name": lambda other: NamesAnAttribute(SimpleNamespace(ELSEWHERE=torch.tanh)),
}


@pytest.mark.parametrize("name", [*HOLDS, *HOLDS_NOT])
def test_blocks_hold_no_weight_of_another_stage_but_in_modules(name):
    other = ELSEWHERE if name in ("a global", "a name") else nn.Linear(2, 2)
    blocks = [other, nn.Linear(2, 2), {**HOLDS, **HOLDS_NOT}[name](other)]
    SharedState(blocks, [range(3)])
    if name in HOLDS_NOT:
        SharedState(blocks, [range(2), range(2, 3)])
        return
    says = r"block 2 \(.*on stage 1 holds '0\.weight' .*stage 0 trains, as .*; register its module"
    with pytest.raises(qs.MisfitError, match=says):
        SharedState(blocks, [range(2), range(2, 3)])
