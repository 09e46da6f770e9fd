"""Tied weights, held by several stages as one: an embedding and an output head, for example.

    stage 0    0.tokens.weight ─┐
                                ├─ "embedding": same start, gradients are summed (`SyncTied`), same steps
    stage 3    5.head.weight  ──┘

Each stage keeps a copy. The plan has the stages that a name ties (`compile(…, tied={"embedding": (0, 3)})`), the engine
gets the names of the weights (`Engine(…, tied={"embedding": ("0.tokens.weight", "5.head.weight")})`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quintsched.compiler import compiled_again
from quintsched.errors import MisfitError
from quintsched.plan import Plan

from ..blocks.block_builders import Blocks
from ..parallel.mesh_groups import MeshGroups
from .build_stages import Stage, cuts_of


class TiedWeights:
    """The tied weights of one rank.

    Args:
        plan: has the stages that each name ties.
        names: full names of the weights that each name ties, "<block>.<name in the block>".
        cuts: the blocks of each stage.
        stages: this rank's stages.
        groups: the groups of the mesh.

    Raises:
        MisfitError: plan and weights do not tie the same stages, or the copies do not match.
    """

    def __init__(
        self,
        plan: Plan,
        names: Mapping[str, Sequence[str]],
        cuts: Sequence[range],
        stages: Mapping[int, Stage],
        groups: MeshGroups,
    ) -> None:
        self.names = dict(names)
        for name, weights in names.items():
            if len(set(weights)) < 2:
                raise MisfitError(f"tied weight {name!r} names {len(set(weights))} weights; name at least two")
        across = homes_across(names, cuts)
        if names and plan.stage_to_part is not None:
            raise MisfitError(
                f"the model ties weights ({', '.join(names)}), which a bidirectional schedule cannot: its twins "
                "already add up all they hold; take another schedule, or untie them"
            )
        planned = {name: tuple(held) for name, held in plan.tied.items()}
        if across != planned:
            _refuse({name: stages_of(weights, cuts) for name, weights in names.items()}, across, planned)
        self._copies = {name: list(_join(weights, stages)) for name, weights in names.items()}
        for name in across:
            if any(isinstance(parameter, DTensor) for parameter in self._copies[name]):
                raise MisfitError(f"tied weight {name!r} is a DTensor; stages tie weights that PyTorch has not sharded")
        for name, here in self._copies.items():
            if len({parameter.requires_grad for parameter in here}) > 1:
                _refuse_half_frozen(name, names[name])
        self.parameters = {parameter for name in across for parameter in self._copies[name] if parameter.requires_grad}
        self._uncounted = {
            parameter
            for name, held in across.items()
            for number, parameter in enumerate(self._copies[name])
            if number or held[0] not in stages
        }
        for name, held in sorted(across.items()):
            self._start_alike(name, held, groups)

    def copies(self, name: str) -> list[nn.Parameter]:
        """Return this rank's copies; none of a frozen weight, which has no gradients to sum."""
        return [parameter for parameter in self._copies[name] if parameter in self.parameters]

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter counts in the global norm on this rank: only the first copy of a tied weight does."""
        return parameter not in self._uncounted

    @torch.no_grad()
    def _start_alike(self, name: str, home: tuple[int, ...], groups: MeshGroups) -> None:
        here = self._copies[name]
        if not here:
            return
        for other in here[1:]:
            if other.shape != here[0].shape:
                raise MisfitError(f"tied weight {name!r}: {tuple(here[0].shape)} and {tuple(other.shape)} do not fit")
            if other.data_ptr() == here[0].data_ptr():
                other.data = here[0].clone()  # each is stepped on its own
            other.copy_(here[0])
        sharing = groups.sharing.get(home)
        if sharing is not None:
            alike = [int(here[0].requires_grad), *here[0].shape]
            sizes = torch.tensor(alike, dtype=torch.int64, device=here[0].device)
            firsts = sizes.clone()
            sharing.group.broadcast(firsts, sharing.first).wait()
            if not torch.equal(sizes[1:], firsts[1:]):
                raise MisfitError(
                    f"tied weight {name!r}: {tuple(here[0].shape)} here, {tuple(firsts[1:].tolist())} elsewhere"
                )
            if sizes[0] != firsts[0]:
                _refuse_half_frozen(name, self.names[name])
            start = here[0].detach().clone()
            sharing.group.broadcast(start, sharing.first).wait()
            for parameter in here:
                parameter.copy_(start)


def _join(weights: Sequence[str], stages: Mapping[int, Stage]) -> Iterator[nn.Parameter]:
    """Make the tied weights of one stage a single parameter, and yield it; stages in ascending order."""
    for stage in sorted(stages):
        here = [weight for weight in weights if weight.partition(".")[0] in stages[stage].blocks]
        named = {
            name.removeprefix("blocks."): p for name, p in stages[stage].named_parameters()
        }  # a weight that was joined goes by the name that comes first in the stage
        for weight in here:
            if weight not in named:
                raise MisfitError(f"tied weight {weight!r}: its block has no weight of that name")
        for other in here[1:]:
            first, second = named[here[0]], named[other]
            if first.shape != second.shape:
                raise MisfitError(
                    f"tied weights {here[0]!r} and {other!r}: {tuple(first.shape)} and {tuple(second.shape)} do not fit"
                )
            if first.requires_grad != second.requires_grad:
                _refuse_half_frozen(here[0], [here[0], other])
            if len({weight in stages[stage].partial for weight in (first, second)}) > 1:
                raise MisfitError(
                    f"tied weights {here[0]!r} and {other!r} lie on stage {stage}, and sequence parallelism gives but "
                    "one of them all tokens; run without sequence_parallel, or untie them"
                )
            owner, _, name = f"blocks.{other}".rpartition(".")
            setattr(stages[stage].get_submodule(owner), name, first)
        if here:
            yield named[here[0]]


def homes_across(names: Mapping[str, Sequence[str]], cuts: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """Return, for each name whose weights are on several stages, these stages: the ties that a plan needs."""
    homes = {name: stages_of(weights, cuts) for name, weights in names.items()}
    return {name: held for name, held in homes.items() if len(held) > 1}


def with_ties(
    plan: Plan, blocks: Blocks, tied: Mapping[str, Sequence[str]], block_costs: Sequence[float] | None
) -> Plan:
    """Return a plan compiled with the model's ties; unchanged if it has ties already, or cannot be compiled again."""
    if plan.tied or not tied or plan.stage_to_part is not None:
        return plan
    across = homes_across(tied, cuts_of(plan, blocks, block_costs))
    return (compiled_again(plan, tied=across) or plan) if across else plan


def stages_of(weights: Sequence[str], cuts: Sequence[range]) -> tuple[int, ...]:
    """Return the stages that hold these weights, in ascending order; raises `MisfitError` for an unknown block."""
    found = set()
    for weight in weights:
        holders = [stage for stage, blocks in enumerate(cuts) if _block(weight) in blocks]
        if not holders:
            raise MisfitError(
                f"tied weight {weight!r}: names begin with the number of a block, 0 to {cuts[-1].stop - 1}"
            )
        found.update(holders)
    return tuple(sorted(found))


def _block(weight: str) -> int:
    number = weight.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _refuse_half_frozen(name: str, weights: Sequence[str]) -> NoReturn:
    raise MisfitError(
        f"tied weight {name!r} ({', '.join(weights)}) is trained in one block and frozen in another; freeze it in all "
        "of them, or in none"
    )


def _refuse(
    homes: Mapping[str, tuple[int, ...]], across: Mapping[str, tuple[int, ...]], planned: Mapping[str, tuple[int, ...]]
) -> NoReturn:
    wanted = " ".join(f"--tied {name}={','.join(map(str, stages))}" for name, stages in sorted(across.items()))
    naming = "".join(
        f"name weights of {name!r}, Engine(…, tied={{{name!r}: ('0.weight', '5.weight')}}), or "
        for name in sorted(planned.keys() - homes.keys())[:1]
    )
    raise MisfitError(
        f"the plan ties {dict(planned) or 'nothing'}, the model's tied weights lie on stages {dict(homes) or 'none'}; "
        f"{naming}compile the plan with {wanted or 'no --tied'}; --schedule PLAN keeps the order of a plan file"
    )
