"""Stages of one rank: cut from the blocks, built one block at a time, sharded over ep (experts) and tp.

blocks   0 1 2 3 4 5 6 7 8 9                 each block: build ─▶ same start everywhere ─▶ keep this rank's shard
stages  [  0  ][  1  ][ 2 ][ 3 ]                       cut by block costs, or as the plan fixes it

Partition of blocks into contiguous stages that minimizes the cost of the slowest stage.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError, counted
from quintsched.ir.layout import Layout
from quintsched.ir.plan_data import PlanData, listed

from ..autograd.engine_owned_layers import Hold, holds_on, take_back
from ..blocks.block_builders import Blocks, build_block
from ..blocks.block_costs import estimate_costs
from ..blocks.dtensor import local_of, prepare_sharded
from ..blocks.state_dict_entries import spread_buffers
from ..comm import Group
from ..comm.host_collectives import first_said
from ..guards.repeatable_builders import why_unlike
from ..guards.weights_not_held import why_separated
from ..parallel.cut_proofs.prove_cuts_in_first_step import Prover
from ..parallel.expert.moe import apply_expert_parallel, mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.mesh_independent_dropout import Masks, key_dropouts
from ..parallel.synced_norm import take_over_synced
from ..parallel.tensor.parameter_shards import shard_of
from ..parallel.tensor.whole_model_cuts import TensorCuts


class Stage(nn.Module):
    """One contiguous piece of the model; blocks keep their numbers in the whole model. `StageForward` runs it.

    `partial` are the weights whose gradients are partial sums over tp (see `parallel.tensor.sequence_parallel`).
    """

    def __init__(
        self, index: int, blocks: Mapping[int, nn.Module], partial: frozenset[nn.Parameter] = frozenset()
    ) -> None:
        super().__init__()
        self.index = index
        self.partial = partial
        self.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        self._frozen = {name: p for name, p in self.named_parameters() if not p.requires_grad}
        self._held: list[dict[str, Any]] = []
        self._approved: list[Any] = []

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters, by their names in the whole model: "3.attn.qkv.weight".

        These are all that were not frozen when the stage was made; some may have been frozen since.
        """
        return {name.removeprefix("blocks."): p for name, p in self.named_parameters() if name not in self._frozen}

    def require_known_weights(self, known: Container[nn.Parameter]) -> None:
        """Raise `MisfitError` for a trainable parameter that is not `known`.

        It was frozen when the stage was made, or has replaced a known parameter since.
        """
        now, approved = [*chain.from_iterable(map(dict.values, self._held))], self._approved  # cheap, for every step
        is_same = len(now) == len(approved) and all(map(is_, now, approved)) and self._held
        if not is_same or (self._frozen and any(p.requires_grad for p in self._frozen.values())):
            self._look_through(known)
            both = [found for module in self.modules() for found in (module._parameters, module._modules)]
            self._held = [found for found in both if found]
            self._approved = [*chain.from_iterable(map(dict.values, self._held))]

    def _look_through(self, known: Container[nn.Parameter]) -> None:
        for name, parameter in self.named_parameters():
            if parameter not in known and parameter.requires_grad and name not in self._frozen:
                raise MisfitError(
                    f"{name.removeprefix('blocks.')} is another parameter than when the engine was made, which no "
                    "optimizer knows; write the new numbers into the one that there was, by engine.set_weights"
                )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise MisfitError(
                    f"{name.removeprefix('blocks.')} is to be trained, but was frozen when the engine was made, so "
                    "that no replica sums its gradient and no optimizer knows it; make the engine while all that is "
                    "ever trained has requires_grad=True, and freeze it then: parameter.requires_grad_(False)"
                )


def cut(costs: Sequence[float], layout: Layout) -> list[range]:
    """Return each stage's blocks: contiguous, with the exact minimum of the slowest stage."""
    stages = range(len(layout.stage_to_pp))
    ranges = partition(costs, 1 + max(map(layout.part_of, stages)))
    return [ranges[layout.part_of(stage)] for stage in stages]


def cuts_of(plan: PlanData, blocks: Blocks, costs: Sequence[float] | None) -> list[range]:
    """Return each stage's blocks: as the plan fixes them, or else balanced by costs (None: estimated).

    Raises `UsageError` for costs of another number of blocks, or costs where the plan fixes the stages.
    """
    if plan.blocks_per_stage:
        if costs is not None:
            raise UsageError(
                f"the plan says how many blocks each stage has ({listed(plan.blocks_per_stage)}), so that there is "
                "nothing to balance; leave out block_costs, or compile the plan without stages"
            )
        return cut_as_planned(plan, len(blocks))
    costs = estimate_costs(blocks) if costs is None else costs
    if len(costs) != len(blocks):
        raise UsageError(f"there are {len(costs)} block_costs for {counted(len(blocks), 'block')}")
    return cut(costs, plan.layout)


def cut_as_planned(plan: PlanData, num_blocks: int) -> list[range]:
    """Return each stage's blocks, as many as in the plan; raises `MisfitError` where the total is not the model's."""
    layout, planned = plan.layout, plan.blocks_per_stage
    counts = dict(sorted((layout.part_of(stage), blocks) for stage, blocks in enumerate(planned)))
    ends = [0, *accumulate(counts.values())]
    if ends[-1] != num_blocks:
        each, rest = divmod(num_blocks, len(counts))
        evenly = ",".join(str(each + (layout.part_of(stage) < rest)) for stage in range(len(planned)))
        raise MisfitError(
            f"the plan's stages have {listed(planned)} blocks, {ends[-1]} of a model, but the model has "
            f"{num_blocks}; compile the plan with --stages and numbers that add up to that, like --stages {evenly}"
        )
    return [range(*ends[layout.part_of(stage) :][:2]) for stage in range(len(planned))]


def build_stages(
    blocks: Blocks,
    cuts: Sequence[range],
    layout: Layout,
    pp_rank: int,
    groups: MeshGroups,
    tensor: TensorCuts,
    prover: Prover,
    *,
    outlines: Sequence[nn.Module],
    seed: int,
    masks: Masks,
    dtype: torch.dtype | None,
    device: torch.device,
    moves: str,
    hold: Hold,
) -> dict[int, Stage]:
    """Build the stages of `pp_rank`; at no time does it hold more than one full block.

    All ranks that hold a block start from the weights of the first of them. Dropouts draw by `masks`. `prover` records
    blocks while they are whole. Raises `MisfitError` on all ranks for a function that built another block than for the
    outlines, and for memory shared with weights that the plan `moves`, as it says in words (collective).
    """
    refused: list[str] = []

    def build(number: int, stage: int) -> nn.Module:
        module = build_block(blocks[number], number, seed, dtype).to(device)
        unlike = why_unlike(number, blocks[number], outlines[number], module)
        refused.append(unlike or (moves and why_separated(number, module, moves)))
        _require_own(number, module)
        hold.take(module.parameters())
        spread_buffers(module)
        prepare_sharded(module, number, groups.tensor, groups.replicas)
        for held in (*module.parameters(), *module.buffers()):
            _same_everywhere(local_of(held), groups.copies_of(held))
            if layout.twins(stage) in groups.sharing:
                _same_everywhere(local_of(held), groups.sharing[layout.twins(stage)].group)
        key_dropouts(module, number, masks)
        take_over_synced(module)
        builder = None if isinstance(blocks[number], nn.Module) else blocks[number]
        choice = prover.choose(number, module, builder)
        apply_expert_parallel(module, groups.experts, groups.context, tokens_alike=True)  # set anew per step
        cut = tensor.apply(number, module, choice)
        if groups.tensor.size * groups.experts.size > 1:
            hold.take(cut.parameters())  # parts replace the whole weights
        prover.record_block(number, cut)
        return cut

    def made(stage: int) -> Stage:
        built = {number: build(number, stage) for number in cuts[stage]}
        return Stage(stage, built, tensor.partial(built))

    stages = {stage: made(stage) for stage in sorted(layout.stages_of(pp_rank), key=layout.part_of)}
    if said := first_said(next(filter(None, refused), ""), groups.world):
        raise MisfitError(said)
    return stages


def require_separate(blocks: Sequence[nn.Module], cuts: Sequence[range], tensor: Group) -> None:
    """Raise `MisfitError` for modules that cannot be cut into stages, and sharded over tp and ep, independently.

    These are weights shared by modules of several stages, or by several modules that are sharded: each stage trains its
    own copy, so the copies would diverge silently. `blocks` are on the meta device (`on_meta`), so that functions that
    build several blocks around one weight are found too.
    """
    homes: dict[int, tuple[int, int]] = {}
    for numbers in dict.fromkeys(cuts):
        stage = cuts.index(numbers)
        for number in numbers:
            block = blocks[number]
            for name, parameter in block.named_parameters():
                first_stage, first = homes.setdefault(id(parameter), (stage, number))
                if first != number and (first_stage != stage or tensor.size > 1):
                    raise MisfitError(
                        f"blocks {first} and {number} share the weight {name!r}; a weight may be shared by blocks of "
                        f"one stage, without tensor parallelism (they are on stages {first_stage} and {stage}); give "
                        "each block a copy and tie these, compile(…, tied={'shared': …}) and Engine(…, tied={'shared': "
                        "…}), or take the blocks of quintsched.runtime.split(model), which does"
                    )


def _require_own(number: int, module: nn.Module) -> None:
    """Raise `MisfitError` for a module that another rank of this process trains: both would step its weights."""
    if any(hold.is_of_other_rank for hold in holds_on(module)):
        raise MisfitError(
            f"block {number} ({type(module).__name__}) is trained by another rank of this process; make the model in "
            "the function that every rank runs, or give the engine functions that build blocks"
        )


def take_from_others(blocks: Blocks) -> None:
    """End the earlier engines of these blocks; raise `MisfitError` for those that are sharded: they would be twice."""
    given = {number: block for number, block in enumerate(blocks) if isinstance(block, nn.Module)}
    for number, block in given.items():
        if any(hasattr(parameter, "_quintsched_moved") for parameter in block.parameters()):
            raise MisfitError(
                f"block {number} ({type(block).__name__}) has no weights of its own: another engine holds shards of "
                "them (ZeRO-3); give each engine blocks of its own, and what that engine.full_state_dict() returns to "
                "this engine.load_full_state_dict(…)"
            )
        if any(shard_of(parameter) is not None for parameter in block.parameters()):
            raise MisfitError(f"block {number} is cut over tp already; give each engine whole blocks, it cuts them")
        if any(layer.group.size > 1 for layer in mixtures(block).values()):
            raise MisfitError(f"the experts of block {number} are cut over ep already; give each engine all")
    for block in given.values():
        take_back(block)


def _same_everywhere(tensor: Tensor, group: Group) -> None:
    if group.size > 1:
        sent = tensor.detach().contiguous()
        group.broadcast(sent, 0).wait()
        tensor.data.copy_(sent)


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Return `stages` non-empty ranges of blocks, with the exact minimum of the largest sum of costs.

    Among the optimal cuts, earlier stages take as many blocks as they can. Dynamic programming over
    (stages, blocks), O(stages x blocks²) at worst; costs are not negative.
    Raises `MisfitError` where there are fewer blocks than stages.
    """
    if len(costs) < stages:
        raise MisfitError(
            f"{counted(len(costs), 'block')} cannot fill {counted(stages, 'stage')}; use fewer stages (pp x chunks) or "
            "more blocks"
        )
    limit = _smallest_limit(costs, stages)
    cuts, first = [], 0
    for stage in range(stages):
        last, total = first, 0.0
        spare = len(costs) - (stages - stage - 1)
        while last < spare and (last == first or total + costs[last] <= limit):
            total += costs[last]
            last += 1
        cuts.append(range(first, last))
        first = last
    return cuts


def _smallest_limit(costs: Sequence[float], stages: int) -> float:
    """Return the minimum over all cuts of the largest sum, summing each stage from its first block on."""
    num_blocks = len(costs)
    best = [0.0] + [float("inf")] * num_blocks
    for _ in range(stages):
        following = [float("inf")] * (num_blocks + 1)
        for first in range(num_blocks):
            total = 0.0
            for last in range(first, num_blocks):
                total += costs[last]
                following[last + 1] = min(following[last + 1], max(best[first], total))
        best = following
    return best[num_blocks]
