"""Random draws of a stage's blocks, as a function of the unit that they run on.

    first run      user blocks are watched                           ─┬─▶ no draws: they run as they are
                                                                      └─▶ draws: generators are seeded around each
    a later run    torch's generators have moved nevertheless        ───▶ all are watched again

The masks of nn.Dropout need none of this (`parallel.mesh_independent_dropout`). Blocks that draw otherwise are not
compiled, as compiled code would draw from its own generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..comm import Group
from ..parallel.mesh_independent_dropout import KeyedDropout, Masks, MaskUnit
from ..parallel.seeded_block_draws import BlockDraws
from ..parallel.tensor.cut_rules import is_built_in

Outputs = tuple[Any, ...]
"""A row of tensors: those of the output, then those carried along, in the order of the parcel's specs.

The last stage's row is its output alone, as the last block returned it.
"""

Extras = Mapping[str, Any]
RunBlocks = Callable[[Outputs, Extras], tuple[Outputs, Tensor | None]]

UNIT = "the unit"
"""Key in extras of the unit itself (a `mesh_independent_dropout.MaskUnit`) where blocks draw; they never see it."""

_NOTHING = nullcontext()

_logger = logging.getLogger("quintsched.runtime")


class StageDraws:
    """The random draws of one stage.

    Args:
        masks: keys and generators of this rank's draws.
        blocks: blocks by number.
        sliced: block number → the group over which its input tokens are sharded; None: they are not.
        beside: a torch function mode that the blocks always run in; they are not compiled with it.

    Attributes:
        may_draw: whether blocks draw, or may, as far as the steps so far have shown.
        alarms: the masks' number of alarms when that was found; blocks need their unit again after further ones.
    """

    def __init__(
        self,
        masks: Masks,
        blocks: Mapping[int, nn.Module],
        sliced: Callable[[int], Group | None],
        beside: TorchFunctionMode | None = None,
    ) -> None:
        self.beside, self.masks = beside, masks
        self._blocks, self._draws = blocks, BlockDraws(masks, blocks, sliced)
        self._drops = any(isinstance(module, KeyedDropout) for block in blocks.values() for module in block.modules())
        self._watched = set() if all(map(is_built_in, blocks.values())) else set(blocks)
        self._since: tuple[int, int] | None = None  # first run, and the step that it was of
        self._is_compiled = False
        self.alarms, self.may_draw = masks.alarms, self._drops or bool(self._watched)

    @property
    def are_due(self) -> bool:
        """Whether blocks get their unit: they draw, or may, or a generator has moved since that was found."""
        return self.may_draw or self.alarms != self.masks.alarms

    @property
    def have_drawn(self) -> bool:
        """Whether blocks have drawn so far, or have dropout."""
        modules = (module for block in self._blocks.values() for module in block.modules())
        drops = any(isinstance(module, KeyedDropout) and module.p > 0 for module in modules)
        return drops or self.have_drawn_otherwise

    @property
    def have_drawn_otherwise(self) -> bool:
        """Whether blocks have drawn so far, other than by nn.Dropout."""
        return bool(self._draws.drawn)

    def around(self, number: int, block: nn.Module) -> Callable[..., Any]:
        """Return a callable that runs a block under its unit's seed; modules around a block run as they are."""
        if block is not self._blocks[number]:
            return block

        def call(*args: Any, **extras: Any) -> Any:
            if number not in self._watched:
                return block(*args, **extras)
            with self._draws.running(number):
                return block(*args, **extras)

        return call

    def by_unit(self, plain: RunBlocks, watched: RunBlocks, compiled: RunBlocks | None) -> RunBlocks:
        """Return a callable that runs some blocks with the draws of the unit in their extras.

        Its attribute `plain` runs them without a unit.

        Args:
            plain: runs the blocks.
            watched: runs them by `around`.
            compiled: runs them compiled, for blocks that draw nothing.
        """
        self._is_compiled, beside = self._is_compiled or compiled is not None, self.beside
        plain = plain if compiled is None or beside is not None else compiled

        def run(given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
            unit: MaskUnit | None = extras.get(UNIT)
            if unit is None and beside is None:
                return plain(given, extras)
            with beside or _NOTHING:
                if unit is None:
                    return plain(given, extras)
                self._settle(unit)
                extras = {name: extra for name, extra in extras.items() if name != UNIT}
                with self.masks.draw_for(unit):
                    return (watched if self._watched else plain)(given, extras)

        run.plain = plain if beside is None else None  # type: ignore[attr-defined]
        return run

    def again(self, unit: MaskUnit) -> AbstractContextManager[object]:
        """Return the context for a unit's backward, which may rerun parts of the forward with the same draws."""
        if self.beside is None and not self._watched:
            return self.masks.again(unit)
        return self._again_in_modes(unit)

    @contextmanager
    def _again_in_modes(self, unit: MaskUnit) -> Iterator[None]:
        with self.beside or _NOTHING, self.masks.again(unit), self._draws.again() if self._watched else _NOTHING:
            yield

    def _settle(self, unit: MaskUnit) -> None:
        """Stop watching blocks that drew nothing in the first run; watch all again after a later draw."""
        if self.alarms != self.masks.alarms:
            self.alarms, self._since = self.masks.alarms, None
            self._watch(set(self._blocks))
        if not self._watched:
            return
        if self._since is None:
            self._since = unit.run, unit.step
        first, step = self._since
        if first != unit.run and self._watched != self._draws.drawn:
            self._watch(set(self._draws.drawn))
        if self._watched and first == unit.run - 1:
            self._tell(step)
            self._since = -1, step

    def _watch(self, blocks: set[int]) -> None:
        self._watched, self.may_draw = blocks, self._drops or bool(blocks)
        self.masks.changes += 1

    def _tell(self, since: int) -> None:
        """Warn once that drawing blocks are not compiled, or that they began to draw after the first step."""
        numbers = ", ".join(map(str, sorted(self._watched)))
        if self._is_compiled:
            _logger.warning("blocks %s draw random numbers other than by nn.Dropout, and are not compiled", numbers)
        elif self.alarms:
            _logger.warning(
                "blocks %s draw random numbers since step %d, and did not in the first; those of that step had no key "
                "of their own, and were not those of one process",
                numbers,
                since - 1,
            )
