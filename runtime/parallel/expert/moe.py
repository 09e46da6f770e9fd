"""Mixture-of-experts layer, sharded over ep: each rank holds some experts; an all-to-all sends tokens there and back.

                  rank 0: experts 0 1     rank 1: experts 2 3
    assignments   0 0 1  2 3              0 1  2 2 3           by expert; a token has k of them
    all-to-all    0 0 1 │ 0 1             2 3 │ 2 2 3          rows from rank 0 │ from rank 1
    each expert   0 0 0 │ 1 1             2 2 2 │ 3 3          runs once, on all of its rows
    all-to-all    0 0 1  2 3              0 1  2 2 3           back; weighted, and summed in the order of a token's k

No assignment is dropped (Gale et al. 2022, "MegaBlocks"), unless a capacity is set (Fedus et al. 2021, "Switch
Transformers"); with `pad_to_capacity` every expert gets exactly that many rows, and the host never waits for the
routing (see `router`). Every expert runs in every forward, on zero rows if none arrived: so its weights have (zero)
gradients on all ranks at the same point. A shared expert that all tokens pass too (`shared`) is from Dai et al. 2024,
"DeepSeekMoE".

Boundary between tokens and experts that tensor parallelism cuts (`TensorBoundary`):

                                router ──▶ weights ─▷ copy ──────┐
    tokens ─▷ gather or copy ─┤                                  ├─ weighted and summed ─▷ sum or scatter ──▶ tokens
                                all-to-all ─▶ partial sums ──────┘

The experts' column and row layers would each communicate by themselves, once per expert; the boundary does it once for
all of them. For the router all ranks have the same tokens and the same gradients; for the experts each rank's gradient
is a partial sum. Where each rank has a slice of the tokens (`sequence_parallel`), one all-gather serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from quintsched.check_call_arguments import FUNCTION, NUMBER, WHOLE_NUMBER, instance, takes
from quintsched.errors import MisfitError, UsageError

from ...autograd.deferred_weight_grads import linear
from ...blocks.block_builders import TOKENS_DIM
from ...comm import Group, SelfGroup, as_group
from ...comm.autograd_collectives import (
    all_to_all_rows,
    begin_all_gather,
    begin_reduce_scatter,
    copy_to_group,
    gather_from_group,
    outside_compiled,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
)
from .router_and_balancing_losses import Routing, RowCounts, balance_loss, counted, padded, route, z_loss


class MoE(nn.Module):
    """Mixture-of-experts feed-forward layer, top-k routed: (…, D) → (…, D), and an auxiliary loss.

    The loss is summed over tokens, 0-dimensional, to be added to the summed loss of the batch; None in evaluation, and
    where both coefficients are 0.

    Args:
        hidden: width of a token, D.
        experts: number of experts, E.
        make: builds one expert, (rows, D) → (rows, D).
        top_k: number of experts per token, k.
        renormalise: whether the weights of a token's experts are normalised to sum 1.
        capacity_factor: an expert takes at most ceil(factor · T · k / E) of the assignments of a rank's T tokens,
            first come, first served; the rest is dropped. None: no limit. With E / k or more nothing is dropped.
        pad_to_capacity: pass each expert exactly the capacity in rows (T at most), padded with repeated rows: results
            are the same, shapes do not depend on the routing, and the host does not wait for it. Experts must treat
            rows independently.
        balance: coefficient of the balancing loss.
        z: coefficient of the router's z-loss.
        shared: shared expert, which every token passes as well.

    Attributes:
        expert_tokens: (E,), int64: assignments of each expert by this rank's tokens in training forwards, dropped
            ones included.
        tokens_alike: whether all ranks of ep pass equally many tokens in a forward; else row counts are exchanged,
            with `pad_to_capacity` too.
        is_in_experts: whether a forward is running its experts now.

    Raises `UsageError` for an invalid `top_k` or factor, and for padding without a factor or with batch norms.
    """

    expert_tokens: Tensor

    @takes(
        "MoE(hidden, experts, lambda: Expert(…))",
        hidden=WHOLE_NUMBER,
        experts=WHOLE_NUMBER,
        make=FUNCTION,
        top_k=WHOLE_NUMBER,
        capacity_factor=NUMBER,
        shared=instance("a module", nn.Module),
    )
    def __init__(
        self,
        hidden: int,
        experts: int,
        make: Callable[[], nn.Module],
        *,
        top_k: int = 2,
        renormalise: bool = False,
        capacity_factor: float | None = None,
        pad_to_capacity: bool = False,
        balance: float = 0.0,
        z: float = 0.0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise UsageError(f"a token cannot use top_k={top_k} of {experts} experts")
        if capacity_factor is not None and not capacity_factor > 0:  # refuses NaN as well
            raise UsageError(f"capacity_factor is {capacity_factor:g}; it must be above 0, or None for no limit")
        if pad_to_capacity and capacity_factor is None:
            raise UsageError(
                "pad_to_capacity wants a capacity_factor, which says how many rows an expert is given; with "
                f"capacity_factor={experts / top_k:g}, experts / top_k, nothing is dropped"
            )
        self.num_experts, self.top_k, self.renormalise = experts, top_k, renormalise
        self.capacity_factor, self.balance, self.z = capacity_factor, balance, z
        self.pad_to_capacity, self.tokens_alike = pad_to_capacity, True
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleDict({str(number): make() for number in range(experts)})
        if pad_to_capacity and any(isinstance(module, _BatchNorm) for module in self.experts.modules()):
            raise UsageError(
                "experts with batch norms cannot pad: rows that fill up would count in their statistics; take a norm "
                "of each row, or pad_to_capacity=False"
            )
        self.shared = shared
        self.register_buffer("expert_tokens", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.group: Group = SelfGroup(0, torch.device("cpu"))
        self._context: Group = self.group
        self._boundary = TensorBoundary(self.group, cut=False, sliced=False)
        self._uncompiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
        self.is_in_experts = False

    @property
    def waits_for_routing(self) -> bool:
        """Whether each forward synchronises the host with the device to read the row counts of the routing."""
        return not (self.pad_to_capacity and self.tokens_alike)

    def share_out(self, group: Group, context: Group, *, tokens_alike: bool = False) -> None:
        """Keep only this rank's experts, under their global numbers; `context` are the ranks of one sequence.

        Raises `MisfitError` if `group.size` does not divide the number of experts.
        """
        if self.num_experts % group.size:
            choices = ", ".join(str(n) for n in range(1, self.num_experts + 1) if self.num_experts % n == 0)
            raise MisfitError(f"ep={group.size} does not divide {self.num_experts} experts; choose ep from {choices}")
        here = self.num_experts // group.size
        mine = range(group.index * here, (group.index + 1) * here)
        self.experts = nn.ModuleDict({str(number): self.experts[str(number)] for number in mine})
        self.group, self._context = group, context
        self.tokens_alike = tokens_alike or group.size == 1

    def set_boundary(self, boundary: TensorBoundary) -> None:
        """Set the communication of tensor parallelism at the layer's input and output."""
        self._boundary = boundary

    def leave_uncompiled(self) -> None:
        """Exclude the data-dependent part from torch.compile, where the module is part of a compiled one."""
        self._uncompiled = torch.compiler.disable(self._pass_through_experts)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pass every token through its experts (collective over ep and cp)."""
        run = self._shapes_only if tokens.is_meta else self._uncompiled or self._pass_through_experts
        seen, taken = self._boundary.enter(tokens)
        mixed, auxiliary = run(seen.flatten(0, -2), taken.flatten(0, -2))
        output = self._boundary.leave(mixed.view_as(seen))
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output, auxiliary

    def _shapes_only(self, seen: Tensor, taken: Tensor) -> tuple[Tensor, Tensor | None]:
        """Infer shapes on the meta device, without the routing, which depends on data."""
        self._logits(seen)
        made: Tensor = next(iter(self.experts.values()))(taken)
        return made, taken.new_zeros(()) if self.training and (self.balance or self.z) else None

    def _pass_through_experts(self, seen: Tensor, taken: Tensor) -> tuple[Tensor, Tensor | None]:
        """Route by `seen` (T, D), the same on all ranks of tp; `taken` are the same tokens as inputs of the experts."""
        routing = route(self._logits(seen), self.top_k, renormalise=self.renormalise)
        if self.training:
            self.expert_tokens += routing.counts
        return self._mix(taken, routing), self._auxiliary(routing) if self.training else None

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the router's logits: (T, D) to (T, E), in float32 at least."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        logits: Tensor = linear(tokens.to(wide), self.router.weight.to(wide))
        return logits

    def _auxiliary(self, routing: Routing) -> Tensor | None:
        losses = [self.balance * balance_loss(routing, self._context)] if self.balance else []
        losses += [self.z * z_loss(routing)] if self.z else []
        return sum(losses[1:], losses[0]) if losses else None

    def _mix(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Dispatch tokens to their experts, and return the weighted sum of the results: (T, D)."""
        capacity = self._capacity(len(tokens))
        if capacity is None or self.waits_for_routing:
            way = counted(routing, capacity, self.group)
        else:
            way = padded(routing, capacity, self.group)
        from_others = [sum(rows) for rows in way.received]
        assigned = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        arrived = all_to_all_rows(assigned.index_select(0, way.rows), self.group, way.sent, from_others)
        returned = all_to_all_rows(self._run(arrived, way.received), self.group, from_others, way.sent)
        placed = way.place(returned)
        weights = self._boundary.weights(routing.weights).to(tokens.dtype)
        weighed: Tensor = placed.unflatten(0, (-1, self.top_k)) * weights.unsqueeze(-1)
        return weighed.sum(1)

    def _capacity(self, tokens: int) -> int | None:
        """Return the capacity: the most assignments that an expert takes from this rank, at most one per token."""
        if self.capacity_factor is None:
            return None
        share = self.capacity_factor * self.top_k / self.num_experts
        return tokens if share >= 1 else ceil(self.capacity_factor * tokens * self.top_k / self.num_experts)

    def _run(self, rows: Tensor, received: RowCounts) -> Tensor:
        """Run each local expert on its rows. Rows, and results, are ordered by source rank, then by expert."""
        num_here = len(self.experts)
        blocks = rows.split([count for counts in received for count in counts])
        self.is_in_experts = True
        made = [
            expert(torch.cat(blocks[place::num_here])).split([counts[place] for counts in received])
            for place, expert in enumerate(self.experts.values())
        ]
        self.is_in_experts = False
        return torch.cat([made[place][source] for source in range(self.group.size) for place in range(num_here)])

    def touched_parameters(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Yield the experts' parameters, each with the fraction of it that a token uses; padding counts too."""
        rows = self.top_k / self.num_experts
        if self.pad_to_capacity and self.capacity_factor is not None:
            rows = min(1.0, self.capacity_factor * rows)
        for parameter in self.experts.parameters():
            yield parameter, rows

    def extra_repr(self) -> str:
        """Describe the layer with its global number of experts."""
        return f"experts={self.num_experts}, top_k={self.top_k}, ep={self.group.size}"


@takes("apply_expert_parallel(module, group)", module=instance("a module", nn.Module))
def apply_expert_parallel(
    module: nn.Module,
    group: Group | dist.ProcessGroup,
    context: Group | dist.ProcessGroup | None = None,
    *,
    tokens_alike: bool = False,
) -> nn.Module:
    """Shard the experts of every `MoE` in `module` over `group`, in place, and return it.

    Args:
        module: the full module, with the same parameters on all ranks; before tensor parallelism cuts it.
        group: the ranks of ep.
        context: the ranks that hold slices of the same sequences; None: sequences are whole.
        tokens_alike: whether all ranks of ep pass a layer equally many tokens in every forward. If not, layers that
            pad exchange row counts as others do. If set wrongly, the ranks hang.

    Raises `MisfitError` if the size of `group` does not divide a layer's number of experts.
    """
    experts = as_group(group)
    sequences = SelfGroup(0, experts.device) if context is None else as_group(context)
    for layer in mixtures(module).values():
        layer.share_out(experts, sequences, tokens_alike=tokens_alike)
    return module


def expert_weights(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of sharded experts, which are different ones on each rank of ep."""
    shared_out = (layer for layer in mixtures(module).values() if layer.group.size > 1)
    return {parameter for layer in shared_out for parameter in layer.experts.parameters()}


def leave_uncompiled(modules: Mapping[int, nn.Module]) -> None:
    """Exclude the routing of all stages from torch.compile."""
    for module in modules.values():
        for layer in mixtures(module).values():
            layer.leave_uncompiled()


def mixtures(module: nn.Module) -> dict[str, MoE]:
    """Return every mixture of experts in `module` by its name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}


class TensorBoundary:
    """Communication of tensor parallelism at the input and output of one mixture of experts.

    Args:
        group: the ranks of tp.
        cut: whether each rank has a shard of every expert, whose results are partial sums.
        sliced: whether each rank has a slice of the tokens (sequence parallelism).
    """

    def __init__(self, group: Group, *, cut: bool, sliced: bool) -> None:
        self._group, self._cut, self._sliced = group, cut, sliced

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return all tokens (samples, tokens, …) twice: for the router and for the experts."""
        if not self._sliced:
            return tokens, copy_to_group(tokens, self._group) if self._cut else tokens
        if not self._cut:
            whole = gather_from_group(tokens, self._group, TOKENS_DIM)
            return whole, whole
        return _gather_aside(tokens, self._group)

    def weights(self, weights: Tensor) -> Tensor:
        """Return the weights for the experts' results; if these are partial, the weights' gradients are all-reduced."""
        return copy_to_group(weights, self._group) if self._cut else weights

    def leave(self, mixed: Tensor) -> Tensor:
        """Reduce or scatter the weighted results: (samples, tokens, …), or this rank's slice of the tokens."""
        if not self._sliced:
            return reduce_from_group(mixed, self._group) if self._cut else mixed
        leave = reduce_scatter if self._cut else scatter_to_group
        return leave(mixed, self._group, TOKENS_DIM)


class _GatherForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ctx.group = group
        whole = begin_all_gather(tokens, group, TOKENS_DIM).wait_result()
        return whole, whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_seen: Tensor, of_taken: Tensor) -> tuple[Tensor, None]:
        coming = begin_reduce_scatter(of_taken, ctx.group, TOKENS_DIM)
        mine = of_seen.chunk(ctx.group.size, TOKENS_DIM)[ctx.group.index]
        return coming.wait_result() + mine, None


def _gather_for_both(tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    seen, taken = _GatherForBoth.apply(tokens, group)  # type: ignore[no-untyped-call]
    return seen, taken


_gather_aside: Callable[[Tensor, Group], tuple[Tensor, Tensor]] = outside_compiled(_gather_for_both)
"""`_gather_for_both` outside of compiled code, as all collectives (see `collectives`)."""
