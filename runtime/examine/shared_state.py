"""State that two stages have: one module or buffer in blocks of both, a counter of a class, a global of a module.

    model[1] = model[4] = norm     stage 0: norm.running_mean  ┐ each stage would change its own, and neither has
                                   stage 1: norm.running_mean  ┘ what one process would have: refused, where one does

Weights are tied, and tables that no forward changes may be shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from quintsched.errors import MisfitError

from ..blocks.blocks import Parcel
from ..data.snapshot import Snapshot, label_in

Place = tuple[int, str]
"""The number of a block, and the name of something in a snapshot of it."""


class SharedState:
    """What blocks of several stages have in common besides weights.

    Args:
        blocks: all blocks; those that are modules as they were given.
        cuts: the blocks of each stage.
        changed: what forwards are known to change.

    Raises `MisfitError` where forwards change some of it, as far as that is known before they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], cuts: Sequence[range], changed: Collection[Place] = ()) -> None:
        self._kinds = [type(block).__name__ for block in blocks]
        self._stage_of = {number: stage for stage, numbers in reversed([*enumerate(cuts)]) for number in numbers}
        self._homes: dict[Place, list[tuple[Place, bool]]] = {}
        first: dict[int, Place] = {}
        owns: dict[Place, int] = {}
        for number, block in enumerate(blocks):
            for name, token in Snapshot({"": block}, numbers=False).holders():
                here = number, name
                owns.setdefault(here, token)  # of a module its attributes, before its buffers
                if name.startswith((".", " (")) and (home := first.setdefault(token, here))[0] != number:
                    is_copy = owns[home] != owns[here]
                    self._homes.setdefault(home, []).append((here, is_copy))
                    self._homes.setdefault(here, []).append((home, is_copy))
        for number, name in sorted({*changed, *_norms(blocks)}):
            self._require_one_stage(number, name, is_attribute=False)

    def require_one_stage(self, parcels: Sequence[Parcel]) -> None:
        """Raise `MisfitError` where a block was found to change what a block of another stage has as well."""
        named: dict[str, int] = {}
        for number, parcel in enumerate(parcels):
            for state in parcel.state:
                if state.is_named:
                    other = named.setdefault(state.name, number)
                    self._refuse_apart(other, number, f"change {state.name!r}, which is of neither")
                else:
                    self._require_one_stage(number, state.name, is_attribute=state.is_attribute)

    def _require_one_stage(self, number: int, name: str, *, is_attribute: bool) -> None:
        for (other, _), is_copy in self._homes.get((number, name), ()):
            what = f"have one {name.lstrip(' .')}, which a forward changes"
            if is_attribute and is_copy:  # with weights of each block's own, so with attributes of its own
                raise MisfitError(f"{self._said(other, number)} {what}; {_INSTEAD}")
            self._refuse_apart(other, number, what)

    def _refuse_apart(self, one: int, other: int, what: str) -> None:
        one, other = sorted((one, other))
        stages = self._stage_of[one], self._stage_of[other]
        if stages[0] != stages[1]:
            raise MisfitError(
                f"{self._said(one, other)} {what}, and are on stages {stages[0]} and {stages[1]}, of which each would "
                f"change its own; {_INSTEAD}, or keep them on one stage"
            )

    def _said(self, *numbers: int) -> str:
        return "blocks " + " and ".join(f"{number} ({self._kinds[number]})" for number in sorted(numbers))


_INSTEAD = "give each block its own: copy.deepcopy(module)"


def _norms(blocks: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield the norms that keep running statistics, and train."""
    for number, block in enumerate(blocks):
        for path, module in block.named_modules():
            if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
                yield number, label_in(block, path)
