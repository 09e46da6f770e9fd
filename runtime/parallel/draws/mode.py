"""What a block draws by torch's functions, each by a key of its own: seed, step, samples, and which call it is.

    F.dropout(x) ─▶ the mode ─▶ where was it called? "3.mlp: forward 112" ─▶ words of its samples ─▶ a mask
    torch.randperm(n) ────────▶ … ─────────────────────────────────────────▶ torch's generator, seeded by the unit
    rand(3, generator=g) ─────▶ g was seeded in this forward: as plain torch (torch's own within fork_rng, too)

A call is known by its place in the code: the module of the model whose forward runs, and the lines that lead from
there to the draw (`call_places`). So a part of a block that runs again within a backward draws what it drew before.
Where the first dimension of what is drawn is that of the samples, or of samples and tokens in one, each sample has
words of its own, and no cut of the batch changes them; else, and for functions that have no words, all depends on the
unit, by its first sample.

Ranks of tp draw alike, but between a column and its row, where each draws for its shard of heads or features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError

from ...comm import Group
from ..column_row import ColumnRowPair
from ..dropout import Masks, Unit, words
from .call_places import CallPlaces
from .functions import Call
from .names import DRAWS


class _SeededError(Exception):
    """What draws now follows from a seed that the code has given torch's own generator."""


class KeyedDraws(TorchFunctionMode):
    """Within it, what the functions of torch draw is keyed; `has_drawn` says that they did.

    Args:
        masks: what the rank draws by.
        blocks: what runs in it, by number.
        sliced: block number → the ranks over which the tokens are sliced that it is given, if they are.
        apart: modules whose rows are no samples, and which must not draw.
    """

    def __init__(
        self,
        masks: Masks,
        blocks: Mapping[int, nn.Module],
        sliced: Callable[[int], Group | None] = lambda number: None,
        apart: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.has_drawn = False
        self._masks, self._sliced = masks, sliced
        self._first = next(iter(blocks), 0)
        self._names = {
            id(module): (number, f"{number}.{name}" if name else f"{number}")
            for number, block in blocks.items()
            for name, module in block.named_modules()
        }
        self._pairs = {number: _pairs_of(block) for number, block in blocks.items()}
        self._apart = {id(module) for root in apart for module in root.modules()}
        self._calls = CallPlaces({*self._names, *self._apart})
        self._cuts: dict[str, Group | None] = {}
        self._seeded: tuple[Unit | None, dict[int, torch.Generator]] = None, {}
        self._forked: tuple[Unit | None, Tensor] = None, torch.empty(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") not in DRAWS or self._masks.unit is None:
            return func(*args, **given)
        if given.get("generator") is not None:
            self._require_seeded(given["generator"])
            return func(*args, **given)
        try:
            return Call(self, func, args, given).answer()
        except _SeededError:
            result = func(*args, **given)
            self._forked = self._masks.unit, torch.get_rng_state()
            return result

    def _require_seeded(self, generator: torch.Generator) -> None:
        """Raise `MisfitError` for a generator whose numbers do not follow from a seed that this forward gave it."""
        (site, _), unit = self._site(), self._masks.unit
        if self._seeded[0] is not unit:
            self._seeded = unit, {}
        if _is_fresh(generator):
            self._seeded[1][id(generator)] = generator
        if id(generator) not in self._seeded[1]:
            raise MisfitError(
                f"a generator that was not seeded in this forward draws in {site}: each microbatch would go on where "
                "another one stopped; seed it there, generator.manual_seed(…), or draw from torch's own, without "
                "`generator=`, which is keyed by sample"
            )

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return words for what is drawn now."""
        site, number = self._keyed_site()
        cut = self._cut(site, number)
        is_whole = cut is not None or any(pair.is_gathered for pair in self._pairs[number])
        sliced = None if is_whole else self._sliced(number)
        draw = partial(self._words, site, device)
        return self._masks.words_of_part(site, draw, shape, cut, sliced)

    def _words(
        self, site: str, device: torch.device, shape: Sequence[int], cut: Group | None, sliced: Group | None
    ) -> Tensor:
        unit = self._masks.unit
        assert unit is not None
        samples = len(unit.samples)
        if not shape or not shape[0] or shape[0] % samples:
            key = torch.tensor([self._masks.key(f"{site}{_rank(cut)}")], dtype=torch.int64, device=device)
            return words(key, (1, *shape), None, None, None).view(tuple(shape))
        keys = self._masks.keys(site, device)
        if torch.Size(shape[:-1]).numel() == samples:  # a row for each sample, none of tokens
            return words(keys, shape, None, cut, None)
        return words(keys, shape, unit.positions, cut, sliced)

    def seed(self) -> int:
        """Return a seed for what is drawn now."""
        site, number = self._keyed_site()
        cut = self._cut(site, number)
        is_alike = cut is not None and self._masks.cut_dims.get((site, True), 0) is None
        return self._masks.key(f"{site}{_rank(None if is_alike else cut)}")

    def _keyed_site(self) -> tuple[str, int]:
        """Return which call draws; raises `_SeededError` where torch's own generator was seeded within `fork_rng`."""
        site, (unit, after) = self._site(), self._forked
        if self._calls.forks:
            goes_on = unit is self._masks.unit and torch.equal(after, torch.get_rng_state())
            if goes_on or _is_fresh(torch.default_generator):
                raise _SeededError
        return site

    def _site(self) -> tuple[str, int]:
        """Return which call of the model draws, and in which block it is.

        Raises `MisfitError` within experts, whose rows are no samples.
        """
        self.has_drawn = True
        owner, path = self._calls.locate(KeyedDraws.__torch_function__.__code__)
        if owner in self._apart:
            raise MisfitError(
                f"{self._names[owner][1]!r} draws within experts, whose rows are no samples, so that no number "
                "belongs to them; draw before or behind the mixture"
            )
        if owner is None:
            return str(self._first), self._first
        number, name = self._names[owner]
        return f"{name}: {', '.join(path)}", number

    def _cut(self, site: str, number: int) -> Group | None:
        """Return the ranks over which features are cut at a call; None: they are whole.

        In a backward, which may run again what is between a column and its row without these, it is as it was.
        """
        if torch._C._current_graph_task_id() == -1:
            self._cuts[site] = next((pair.group for pair in self._pairs[number] if pair.is_between), None)
        return self._cuts.get(site)


def _pairs_of(block: nn.Module) -> list[ColumnRowPair]:
    """Return the column/row pairs of a block."""
    found = (getattr(module, "pair", None) for module in block.modules())
    return list({id(pair): pair for pair in found if isinstance(pair, ColumnRowPair)}.values())


def _rank(cut: Group | None) -> str:
    return "" if cut is None else f" of shard {cut.index}"


def _is_fresh(generator: torch.Generator) -> bool:
    """Whether a generator was seeded, and has drawn nothing since."""
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(generator.get_state(), fresh.get_state())
