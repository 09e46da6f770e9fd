"""Random draws of blocks, the same on every mesh and schedule: torch's generators are seeded for each block and unit.

    with draws.running(block):       seed, step, first sample, block ─▶ torch's generators ─▶ restored afterwards
        F.dropout(x, p)              number of the call ─▶ hash words of its samples, as in an nn.Dropout
        attention with dropout_p     likewise, for its scores; in nn.MultiheadAttention too
        x + torch.randn_like(x)      as torch draws it: the same for the same microbatches

Where a rank holds a shard of the features (between a column and a row layer) or a slice of the tokens, it may draw one
number per sample, which is equal on all ranks, and call these dropouts; other draws are refused. Draws within experts
are refused too: their rows are not samples.

A part of a block that is rerun in a backward (torch.utils.checkpoint) finds the generator states of its forward, and
draws the same: a call is identified by the generator state before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError, counted

from ..comm import Group
from ..comm.random_generators import SeededGenerators, generator_bytes
from .expert.moe import mixtures
from .mesh_independent_dropout import ColumnRowPair, Masks, MaskUnit, words

FACTORIES = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"})
IN_PLACE_DRAWS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
)
_DRAWS = (
    FACTORIES
    | IN_PLACE_DRAWS
    | {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"}
    | {"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"}
    | {"normal", "bernoulli", "multinomial", "poisson", "binomial", "rrelu", "rrelu_", "gumbel_softmax"}
    | {"_standard_gamma", "_sample_dirichlet", "svd_lowrank", "pca_lowrank"}
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "orthogonal_"}
    | {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices"}
    | {"fractional_max_pool3d_with_indices"}
)
"""Names of torch functions that draw random numbers, some only with certain arguments."""

# torch functions in Python that call others which draw: dropouts, or parts of a forward that are rerun (by
# torch.utils.checkpoint within itself)
_OF_PYTHON = frozenset({"multi_head_attention_forward", "backward", "grad"})

Stays = Callable[[Sequence[int], float], Tensor]
"""(shape of the mask, drop probability) → the mask, bool: True where an element is kept."""


class _KeyedCall(NamedTuple):
    """A keyed call: its name in the model, and the group over which features are cut, or tokens sliced, there."""

    site: str
    cut: Group | None
    sliced: Group | None


class BlockDraws(TorchFunctionMode):
    """Torch function mode that intercepts the random draws of blocks.

    Args:
        masks: the rank's source of keyed masks.
        blocks: by number.
        sliced: block number → the group over which the block's input tokens are sliced; None if they are whole.

    Attributes:
        drawn: numbers of the blocks that have drawn so far.
    """

    def __init__(
        self,
        masks: Masks,
        blocks: Mapping[int, nn.Module],
        sliced: Callable[[int], Group | None] = lambda number: None,
    ) -> None:
        super().__init__()
        self.drawn: set[int] = set()
        self._masks, self._device, self._sliced = masks, masks.device, sliced
        self._pairs = {number: _pairs_of(block) for number, block in blocks.items()}
        self._mixtures = {number: [*mixtures(block).values()] for number, block in blocks.items()}
        self._number, self._seed, self._count, self._step = next(iter(blocks), 0), 0, 0, 0
        self._calls: dict[int, _KeyedCall | None] = {}
        self._seeded: tuple[MaskUnit | None, dict[int, torch.Generator]] = None, {}

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Context for the forward of a block, for the current unit of the masks."""
        unit = self._masks.unit
        assert unit is not None
        if self._step != unit.step:
            self._step = unit.step
            self._calls.clear()
        self._number, self._seed, self._count = number, self._masks.key(f"block {number}"), 0
        with SeededGenerators(self._seed, self._device):
            first = b"" if number in self.drawn else generator_bytes(self._device)
            with self:
                yield
            if first and first != generator_bytes(self._device):
                self.drawn.add(number)
                self._masks.have_drawn = True

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context for the backward of the current unit, which may rerun parts of forwards (torch.utils.checkpoint)."""
        with SeededGenerators(0, self._device), self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _OF_PYTHON and self._masks.unit is not None:
            with self:
                return _seen_through(func)(*args, **given)
        if name not in _DRAWS or self._masks.unit is None:
            return func(*args, **given)
        generator = given.get("generator")
        if generator is not None:
            self._require_seeded(generator)
        elif (made := self._draw_keyed(func, args, given)) is not None:
            return made
        before = self._state()
        result = func(*args, **given)
        if generator is not None or self._state() != before:
            self._require_whole(name, result, before if generator is None else None)
        return result

    def _draw_keyed(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Return the result of a keyed dropout; None where it drops nothing, or the block has seeded the generator."""
        keyed = KEYED.get(func.__name__)
        if keyed is None or self._has_own_seed:
            return None
        made = keyed(self._stays, *args, **given)
        if made is not BY_DEVICE:
            return made
        call = self._next_call()
        shard = f" of shard {call.cut.index}" if call.cut is not None else ""
        with SeededGenerators(self._masks.key(f"{call.site}{shard}"), self._device):
            return func(*args, **given)

    @property
    def _has_own_seed(self) -> bool:
        """Whether the forward that runs has seeded torch's default generator itself."""
        is_forward = torch._C._current_graph_task_id() == -1
        return is_forward and torch.default_generator.initial_seed() != self._seed

    def _stays(self, shape: Sequence[int], p: float) -> Tensor:
        """Return the mask of a tensor of this shape, bool; each element is dropped with probability p."""
        call = self._next_call()
        with torch.no_grad():
            drawn = self._masks.words_of_part(call.site, partial(self._words, call), shape, call.cut, call.sliced)
            return drawn >= round(p * 2**32)

    def _next_call(self) -> _KeyedCall:
        """Identify the call that draws now; advances the generator, so that the next call finds another state."""
        state, call = self._state(), None
        if torch._C._current_graph_task_id() == -1:
            pairs = self._pairs[self._number]
            cut = next((pair.group for pair in pairs if pair.is_between), None)
            is_whole = cut is not None or any(pair.is_gathered for pair in pairs)
            self._require_no_experts("dropout")
            call = _KeyedCall(
                f"{self._number}: draw {self._count}", cut, None if is_whole else self._sliced(self._number)
            )
            self._calls[state], self._count = call, self._count + 1
        call = call or self._calls.get(state)
        if call is None:
            raise self._unknown("dropout")
        torch.randint(2, (), device="cpu")
        return call

    def _words(self, call: _KeyedCall, *, shape: Sequence[int], cut: Group | None, sliced: Group | None) -> Tensor:
        unit = self._masks.unit
        assert unit is not None
        samples = len(unit.samples)
        if shape and shape[0] and samples and not shape[0] % samples:
            keys = self._masks.sample_keys(call.site, self._device)
            is_row = torch.Size(shape[:-1]).numel() == samples  # one row per sample: no token dimension
            return words(keys, shape, None if is_row else unit.positions, cut, None if is_row else sliced)
        if samples and (cut is not None or sliced is not None or unit.positions is not None):
            raise MisfitError(
                f"block {self._number} drops out of {tuple(shape)} for {counted(samples, 'sample')}, of which this "
                "rank has a part; the first dimension must be that of the samples, or samples and tokens in one"
            )
        key = torch.tensor([self._masks.key(call.site)], dtype=torch.int64, device=self._device)
        return words(key, (1, *shape), None, None, None).view(tuple(shape))

    def _require_whole(self, name: str, result: Any, state: int | None) -> None:
        """Raise `MisfitError` if this rank drew only its part of a tensor that one process draws whole.

        `state` is the generator state before the call; None for an explicit generator.
        """
        if torch._C._current_graph_task_id() != -1:
            if state is not None and state not in self._calls:
                raise self._unknown(name)
            return
        if state is not None:
            self._calls[state] = None
        self._require_no_experts(name)
        unit, number = self._masks.unit, self._number
        assert unit is not None
        pairs = self._pairs[number]
        if any(pair.is_between for pair in pairs):
            part, helps = "features, between the layers of a pair", "in front of the pair or behind it"
        elif unit.positions is not None or (
            self._sliced(number) is not None and not any(pair.is_gathered for pair in pairs)
        ):
            part, helps = "the tokens", "where tokens are whole"
        else:
            return
        if not (isinstance(result, Tensor) and result.numel() <= len(unit.samples)):
            raise MisfitError(
                f"block {number} draws by {name} for its part of {part}, where a rank draws other numbers than one "
                f"process; draw a number for each sample, use a dropout (nn.Dropout, F.dropout), or draw {helps}"
            )

    def _require_no_experts(self, name: str) -> None:
        if any(layer.is_in_experts for layer in self._mixtures[self._number]):
            raise MisfitError(
                f"block {self._number} draws by {name} within experts, whose rows are no samples, so that no number "
                "belongs to them; draw before or behind the mixture"
            )

    def _unknown(self, name: str) -> MisfitError:
        return MisfitError(
            f"blocks {', '.join(map(str, self._pairs))} draw by {name} in a backward what no forward has drawn; let "
            "torch.utils.checkpoint keep the generators (preserve_rng_state=True), and draw in forwards only"
        )

    def _require_seeded(self, generator: torch.Generator) -> None:
        """Raise `MisfitError` for an explicit generator that was not seeded in this forward."""
        self.drawn.add(self._number)
        if self._seeded[0] is not self._masks.unit:
            self._seeded = self._masks.unit, {}
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if torch.equal(generator.get_state(), fresh.get_state()):
            self._seeded[1][id(generator)] = generator
        if id(generator) not in self._seeded[1]:
            raise MisfitError(
                f"a generator that was not seeded in this forward draws in block {self._number}: each microbatch would "
                "go on where another one stopped; seed it there, generator.manual_seed(…), or draw from torch's own, "
                "without `generator=`"
            )

    def _state(self) -> int:
        return hash(generator_bytes(self._device))


@cache
def _seen_through(function: Any) -> Callable[..., Any]:
    """Return a copy of a function of torch that does not hand itself to a mode, so that the mode sees what it calls."""
    return type(function)(  # type: ignore[no-any-return]
        function.__code__,
        function.__globals__ | dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda given: False),
        function.__name__,
        function.__defaults__,
    )


def _pairs_of(block: nn.Module) -> list[ColumnRowPair]:
    """Return the column/row pairs of a block."""
    found = (getattr(module, "pair", None) for module in block.modules())
    return list({id(pair): pair for pair in found if isinstance(pair, ColumnRowPair)}.values())


def _dropout(
    stays: Stays, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor | None:
    if not (training and train and 0 < p <= 1 and input.numel()):
        return None
    found = (input * stays(input.shape, p)).mul_(1 / (1 - p) if p < 1 else 0.0)
    return input.copy_(found) if inplace else found


# in place of a result: fused kernels of accelerators draw themselves, from a seeded generator
BY_DEVICE = torch.empty(0)


def _attention(
    stays: Stays,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attend from (…, queries, size) to (…, keys, size), with dropout of the attention probabilities.

    None where nothing is dropped; `BY_DEVICE` off the CPU.
    """
    if dropout_p == 0 or query.device.type != "cpu":
        return None if dropout_p == 0 else BY_DEVICE
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    shares = scores.softmax(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shares = shares.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    dropped = _dropout(stays, shares, dropout_p)
    return None if dropped is None else dropped @ value


KEYED: Mapping[str, Callable[..., Tensor | None]] = {
    "dropout": _dropout,
    "dropout_": partial(_dropout, inplace=True),
    "scaled_dot_product_attention": _attention,
}
"""Keyed functions by name: implementations that take the mask from `Stays`; they return None if nothing is dropped."""
