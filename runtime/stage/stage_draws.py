"""What the blocks of a stage draw is keyed by the unit that they run on.

    first step     a mode watches what blocks that are not built in draw   ─┬─▶ nothing: they run as they are
                                                                            └─▶ something: the mode stays
    a later step   torch's generators have moved all the same              ───▶ the mode watches again

The masks of an nn.Dropout need no mode (`parallel.dropout`). Blocks that draw otherwise are left out of compiled code,
which would draw by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..comm import Group
from ..parallel.draws.mode import KeyedDraws
from ..parallel.dropout import KeyedDropout, Masks, Unit
from ..parallel.expert.moe import mixtures
from ..parallel.tensor.rules import is_built_in

Outputs = tuple[Any, ...]
"""A row of tensors: those of the output, then what rides along, in the order of the parcel's specs.

That of the last stage has nothing but its output, as the last block gave it.
"""

Extras = Mapping[str, Any]
Run = Callable[[Outputs, Extras], tuple[Outputs, Tensor | None]]

UNIT = "the unit"
"""Under this key a unit's extras say which one it is (a `dropout.Unit`), where blocks draw; blocks never see it."""

_NOTHING = nullcontext()

_logger = logging.getLogger("quintsched.runtime")


class StageDraws:
    """The draws of one stage.

    Args:
        masks: what the rank draws by.
        blocks: by number.
        sliced: block number → the ranks over which the tokens are sliced that it is given, if they are.
        beside: another mode that the blocks always run in, and are not compiled for.

    Attributes:
        may_draw: whether blocks draw, or may, by what is known of the steps so far.
        alarms: how many the masks had then: blocks want their unit, too, where there have been others since.
    """

    def __init__(
        self,
        masks: Masks,
        blocks: Mapping[int, nn.Module],
        sliced: Callable[[int], Group | None],
        beside: TorchFunctionMode | None = None,
    ) -> None:
        self.beside, self.masks = beside, masks
        self._blocks, self._sliced = blocks, sliced
        self._drops = any(isinstance(module, KeyedDropout) for block in blocks.values() for module in block.modules())
        self._mode = None if all(map(is_built_in, blocks.values())) else self._watch()
        self._since: int | None = None
        self._is_compiled = False
        self.alarms, self.may_draw = masks.alarms, self._drops or self._mode is not None

    def _watch(self) -> KeyedDraws:
        apart = [layer.experts for block in self._blocks.values() for layer in mixtures(block).values()]
        return KeyedDraws(self.masks, self._blocks, self._sliced, apart)

    @property
    def have_drawn(self) -> bool:
        """Whether blocks have drawn so far, or drop out."""
        modules = (module for block in self._blocks.values() for module in block.modules())
        drops = any(isinstance(module, KeyedDropout) and module.p > 0 for module in modules)
        return drops or self.have_drawn_otherwise

    @property
    def have_drawn_otherwise(self) -> bool:
        """Whether blocks have drawn so far other than by dropping out."""
        return self._mode is not None and self._mode.has_drawn

    def keyed(self, run: Run, compiled: Run | None) -> Run:
        """Return what runs some of the blocks by the unit of their extras; compiled, where they draw nothing.

        Its attribute `plain` runs them where they are given no unit.
        """
        fast, beside = run if compiled is None or self.beside is not None else compiled, self.beside
        self._is_compiled = self._is_compiled or compiled is not None

        def keyed(given: Outputs, extras: Extras) -> tuple[Outputs, Tensor | None]:
            unit: Unit | None = extras.get(UNIT)
            if unit is None and beside is None:
                return fast(given, extras)
            with beside or _NOTHING:
                if unit is None:
                    return fast(given, extras)
                self._settle(unit)
                extras = {name: extra for name, extra in extras.items() if name != UNIT}
                with self.masks.of(unit):
                    if self._mode is None:
                        return fast(given, extras)
                    with self._mode:
                        return run(given, extras)

        keyed.plain = fast if beside is None else None  # type: ignore[attr-defined]
        return keyed

    def again(self, unit: Unit | None) -> AbstractContextManager[object] | None:
        """Return the context, if any, for the backward of a unit, which may run parts of the forward again."""
        if unit is None:
            return self.beside
        if self.beside is None and self._mode is None:
            return self.masks.again(unit)
        return self._again_in_modes(unit)

    @contextmanager
    def _again_in_modes(self, unit: Unit) -> Iterator[None]:
        with self.beside or _NOTHING, self.masks.again(unit), self._mode or _NOTHING:
            yield

    def _settle(self, unit: Unit) -> None:
        """Stop watching where nothing was drawn in the first step; begin again where something was drawn since."""
        if self.alarms != self.masks.alarms:
            self.alarms, self._since = self.masks.alarms, None
            self._mode = self._mode or self._watch()
            self.may_draw = True
        if self._mode is None:
            return
        if self._since is None:
            self._since = unit.step
        elif self._since != unit.step and not self._mode.has_drawn:
            self._mode = None
            self.may_draw = self._drops
        elif self._since == unit.step - 1 and self._is_compiled:
            _logger.warning(
                "blocks %s draw random numbers other than by nn.Dropout, and are not compiled",
                ", ".join(map(str, self._blocks)),
            )
            self._since = -1
        elif self._since == unit.step - 1 and self.alarms:
            numbers = ", ".join(map(str, self._blocks))
            _logger.warning(
                "blocks %s draw random numbers since step %d, and did not in the first; those of that step had no key "
                "of their own, and were not those of one process",
                numbers,
                self._since - 1,
            )
            self._since = -1
