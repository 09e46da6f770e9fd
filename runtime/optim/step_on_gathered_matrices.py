"""Optimizer steps on whole matrices under tensor parallelism: gathered before the step, scattered after it.

    rank 0  [ shard 0 ]─┐                               ┌─▶ [ shard 0 ]
                        ├─▶ [ whole ] ── the step ─────▶│       the same on every rank of tp, with the same state
    rank 1  [ shard 1 ]─┘                               └─▶ [ shard 1 ]

An optimizer whose update of a number depends on its whole parameter (Muon, Adafactor, LAMB) so computes the same as in
one process. It needs memory for its whole matrices and their state on every rank of tp.

For an optimizer that clips by the norm of all gradients but has only some parameters, a rest parameter supplies it:

    rank 0    [ p0 p1 ] + [ r ]        r has one number, with the gradient √(norm² - |∂p0|² - |∂p1|²)
    rank 1    [ p2 ]    + [ r ]        so that the optimizer computes the norm over p0 p1 p2 on both

The engine knows the norm before it steps, so no message is needed. `r` is a parameter during a step only.

Torch's own optimizers step large weights in up to 8 pieces, since a step over many parameters at once (`foreach`) has
temporaries as large as all of them. They step each parameter by itself, so the numbers are the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from quintsched.errors import UsageError

from ..autograd.engine_owned_layers import hold_on
from ..comm import Group
from ..parallel.tensor.parameter_shards import TpShard, gather_full, take_shard
from .accepted_optimizer_forms import nested_in, parameters_of
from .chained_optimizers import parts_of
from .optimizer_extra_state import OwnState, words_of
from .optimizer_state import flat_of
from .tensors_each_optimizer_needs import (
    COUPLING_BY_CLASS,
    OURS,
    Coupling,
    coupling_of,
    coupling_of_class,
    hooks_of,
    kind_of,
)

_logger = logging.getLogger("quintsched.runtime")

_NO_CONTEXT = nullcontext()
_stepped_here, _this_thread = WeakSet[Optimizer](), threading.local()
"""Optimizers that step masters or shards alone, which are no weights of a block; whether one steps in this thread."""
_profiled = torch._C._autograd._profiler_enabled


class GatheredMatrix:
    """A parameter sharded over tp, and its whole matrix during a step.

    Attributes:
        shard: this rank's shard of it.
        full: the tensor that the optimizer steps.
    """

    def __init__(self, shard: nn.Parameter, how: TpShard, group: Group) -> None:
        self.shard, self._group, self._how = shard, group, how
        shape = list(shard.shape)
        shape[how.dim] *= how.size
        self.full = nn.Parameter(torch.empty(shape, dtype=shard.dtype, device=shard.device))

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the parameter and its gradient (collective over tp)."""
        self.full.copy_(gather_full(self.shard, self._group, self._how))
        gradient = self.shard.grad
        self.full.grad = None if gradient is None else gather_full(gradient, self._group, self._how)

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy this rank's part of the stepped matrix to its shard."""
        self.shard.copy_(take_shard(self.full, self._how))
        self.full.grad = None


class Stepper:
    """Steps an optimizer, on whole matrices where it needs them."""

    def __init__(
        self,
        optimizer: Optimizer,
        gathered: Iterable[GatheredMatrix],
        numbers: Sequence[int] | None = None,
        *,
        goes_by_norm: bool = False,
        couplings: Sequence[Coupling] = (),
    ) -> None:
        self.optimizer, self._gathered, self._couplings = optimizer, tuple(gathered), couplings
        self.goes_by_norm = goes_by_norm
        """Whether it depends on the norm of all gradients, but has only some parameters."""
        self._handles = {matrix.shard: matrix.full for matrix in self._gathered}
        self._parts = parts = parts_of([optimizer])
        self._part_of = {p: part for part in parts for p in parameters_of(part)}
        self._own = [OwnState(n, part) for n, part in zip(numbers or range(len(parts)), parts, strict=True)]
        self._foreign = [own for own in self._own if own.is_foreign]
        self._is_first, self._has_shares = True, numbers is not None
        sizes = (p.nbytes if p.is_cpu else p.nbytes // 16 for p in self._part_of)  # a GPU's small steps are launches
        self._pieces = min(8, sum(sizes) >> 22) if type(optimizer) in COUPLING_BY_CLASS else 1
        for part in parts:
            if not any(map(hold_on, part.param_groups[0]["params"])):
                _stepped_here.add(part)
        _global_optimizer_pre_hooks[OURS] = _refuse_own_steps  # type: ignore[index]
        self._stepped = len(self._part_of)

    def state_of(self, master: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer state of a parameter; {} for one that it does not step."""
        parameter = self._handles.get(master, master)
        part = self._part_of.get(parameter)
        return {} if part is None else part.state[parameter]

    def read_beside(self, masters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the optimizers' other state as tensors; `masters` are this rank's, by the names of weights."""
        weights = self._weights(masters)
        names = {id(tensor): words for words, tensor in reversed(words_of(weights).items())}
        packed = [{**own.pack(names), **own.pack_shared(self._of(own, weights))} for own in self._foreign]
        return {name: tensor for one in packed for name, tensor in one.items()}

    def require_beside(self, names: Collection[str]) -> None:
        """Raise `MisfitError` for names of a state that belong to other optimizers."""
        for own in self._own:
            own.require_loadable(names)

    def load_beside(self, state: Mapping[str, Tensor], masters: Mapping[str, nn.Parameter]) -> None:
        """Load a result of `read_beside`, after the per-parameter state."""
        weights = self._weights(masters)
        device = next((parameter.device for parameter, _ in weights.values()), torch.device("cpu"))
        for own in self._foreign:
            own.share(state, self._of(own, weights))
            own.load_packed(state, device, words_of(weights))

    def _weights(self, masters: Mapping[str, nn.Parameter]) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
        handles = {name: self._handles.get(master, master) for name, master in masters.items()}
        return {name: (p, self._part_of[p].state[p]) for name, p in handles.items() if p in self._part_of}

    def _of(
        self, own: OwnState, weights: Mapping[str, tuple[nn.Parameter, dict[str, Any]]]
    ) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
        return {name: (p, kept) for name, (p, kept) in weights.items() if self._part_of[p] is own.optimizer}

    def gathers(self, master: nn.Parameter) -> bool:
        """Whether a parameter, of which `master` is this rank's shard, is stepped as a whole matrix."""
        return master in self._handles

    def group_of(self, master: nn.Parameter) -> Mapping[str, Any]:
        """Return the parameter group of the tensor stepped for a parameter: itself, or its whole matrix."""
        parameter = self._handles.get(master, master)
        part = self._part_of.get(parameter)
        groups = () if part is None else part.param_groups
        return next((group for group in groups if any(parameter is other for other in group["params"])), {})

    def step_weights(self, norm: Tensor | None = None) -> None:
        """Run a step; collective over tp where matrices are gathered.

        `norm` is that of all gradients, 0-dimensional, for an optimizer that depends on it. Raises `UsageError` where
        an optimizer has more parameters than it was built with.
        """
        stepped, hooked = 0, len(_global_optimizer_pre_hooks) > 1 or bool(_global_optimizer_post_hooks)
        for part in self._parts:
            hooked |= bool(part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks or "step" in part.__dict__)
            for group in part.param_groups:
                stepped += len(group["params"])
        if stepped > self._stepped:
            self._refuse_groups(stepped)
        if hooked and self._couplings:
            self._require_declared()
        for matrix in self._gathered:
            matrix.gather()
        for own in self._foreign:
            own.begin_step()
        _this_thread.steps = True
        try:
            with (
                self._refusing_draws() if self._is_first and self._has_shares else _NO_CONTEXT,
                _NO_CONTEXT if norm is None else rest_of_norm(self.optimizer, norm),
            ):
                _step_unrecorded(self.optimizer, self._pieces)
        finally:
            _this_thread.steps = False
        for own in self._foreign:
            own.end_step()
        for matrix in self._gathered:
            matrix.scatter()
        if self._is_first and self._foreign:
            self._warn_of_lost()
        self._is_first = False

    def _refuse_groups(self, stepped: int) -> NoReturn:
        raise UsageError(
            f"the optimizers of this rank were built with {self._stepped} parameters and have {stepped} now "
            "(add_param_group); an engine gives each rank its parameters, gradients and state when it is built: build "
            "them over all parameters, and freeze those that are to learn later (requires_grad_(False)) behind that"
        )

    def _require_declared(self) -> None:
        """Raise `UsageError` for later step hooks that may need what ranks do not have."""
        for part, known in zip(self._parts, self._couplings, strict=True):
            if Coupling.ACROSS not in known and coupling_of(part) != known:
                raise UsageError(
                    f"{kind_of(part)} has others than when the engine was built, which gave each rank a share of "
                    "the parameters; set them in the function that builds it, or write "
                    "optimizer.needs_whole_parameters = False where they change each number by itself"
                )

    def _refusing_draws(self) -> AbstractContextManager[object]:
        odd = [part for part in self._parts if coupling_of_class(type(part)) is None or hooks_of(part)]
        return _RefusedDraws(type(odd[0]).__name__) if odd else nullcontext()

    def _warn_of_lost(self) -> None:
        """Log a warning, after the first step, where the state could not be saved."""
        weights = {str(n): p for n, p in enumerate(self._part_of)}
        try:
            self.read_beside(weights)
            for name, (_, kept) in self._weights(weights).items():
                flat_of(kept, f"parameter {name}")
        except UsageError as error:
            _logger.warning("%s; saving will be refused", error)


def _refuse_own_steps(optimizer: Optimizer, *_: object) -> None:
    """Raise `UsageError` for a step by others of an engine's optimizer, or of weights that an engine trains."""
    if getattr(_this_thread, "steps", False):
        return
    is_own, holds = optimizer in _stepped_here, filter(None, map(hold_on, parameters_of(optimizer)))
    if is_own or any(hold.trains and not hold.ended for hold in holds):
        raise UsageError(
            f"{type(optimizer).__name__}.step() is called on weights that an engine trains: engine.step has stepped "
            "them, and this would go by the same gradients once more; leave optimizer.step() out of the loop"
            + ("" if is_own else ", or call engine.close() before, to train on without the engine")
        )


def _step_unrecorded(optimizer: Optimizer, pieces: int) -> None:
    """Step an optimizer; where neither a profiler nor a hook looks on, in pieces and without torch's record of it.

    That record takes half of the time of a small step.
    """
    beside = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    has_hooks = beside or len(_global_optimizer_pre_hooks) > 1 or _global_optimizer_post_hooks
    own = cast("Any", type(optimizer).step)
    is_torchs = hasattr(own, "hooked") and not hasattr(own.__wrapped__, "hooked")
    if is_torchs and not has_hooks and not _profiled() and optimizer.step == own.__get__(optimizer):
        whole = optimizer.param_groups
        try:
            for groups in _cut_groups(whole, pieces) if pieces > 1 else (whole,):
                optimizer.param_groups = groups
                own.__wrapped__(optimizer)  # the function that torch has put its record around
        finally:
            optimizer.param_groups = whole
    else:
        optimizer.step()


def _cut_groups(groups: Sequence[dict[str, Any]], pieces: int) -> Iterator[list[dict[str, Any]]]:
    """Yield parts of each group, one at a time."""
    for group in groups:
        bounds = [len(group["params"]) * number // pieces for number in range(pieces + 1)]
        yield from ([{**group, "params": group["params"][a:b]}] for a, b in pairwise(bounds) if a < b)


class _RefusedDraws(TorchDispatchMode):
    """Raises `UsageError` where a step draws random numbers, which would differ between ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UsageError(
                f"{self._kind} draws random numbers in its step, and replicas would draw different ones; use an "
                "optimizer that draws none"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def rest_of_norm(optimizer: Optimizer, norm: Tensor) -> Iterator[None]:
    """Return a context with one more parameter, so that an optimizer's gradients have this 2-norm in total."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    squares = [torch.linalg.vector_norm(gradient).to(norm.dtype).square() for gradient in gradients]
    here = torch.stack(squares).sum() if squares else torch.zeros_like(norm)
    group = next(group for group in optimizer.param_groups if group["params"])
    like: nn.Parameter = group["params"][0]
    rest = nn.Parameter(like.new_zeros([1] * like.dim()))
    rest.grad = torch.full_like(rest, 1.0) * (norm.square() - here).clamp(min=0).sqrt().to(rest.real.dtype)
    group["params"].append(rest)
    try:
        yield
    finally:
        group["params"].pop()
        for one in (optimizer, *nested_in(optimizer)):
            one.state.pop(rest, None)
