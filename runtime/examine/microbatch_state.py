"""State that forwards change: it goes by microbatches, not by steps, which is said once where a step has several."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..blocks.blocks import Parcel, State

_MOST_NAMED = 3


def state_named(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return what blocks were found to change, by its names."""
    found = dict.fromkeys(
        f"block {number} ({type(block).__name__}){_place(state)}"
        for number, (block, parcel) in enumerate(zip(blocks, parcels, strict=True))
        for state in parcel.state
        if state.owner.startswith((".", " (")) and not _is_ours(block, state.owner)
    )
    return [*found]


def changed_line(found: Sequence[str], microbatches: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or a step has one microbatch."""
    if not found or microbatches < 2:
        return None
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return (
        f"{', '.join(found[:_MOST_NAMED])}{more}: changed by forwards, of which a step has {microbatches}: it "
        "counts microbatches, not steps, and sees one at a time: let the training loop change what goes by steps"
    )


def _is_ours(block: nn.Module, owner: str) -> bool:
    module = block.get_submodule(owner.partition(" (")[0].removeprefix("."))
    return type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def _place(state: State) -> str:
    """Return where state is in its block, as ".norm.running_mean"."""
    path, _, rest = state.owner.partition(" (")
    return f"{path}{rest.partition(')')[2]}{state.key and f'.{state.key}'}"
