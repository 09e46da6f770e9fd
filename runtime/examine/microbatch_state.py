"""State that forwards change: it goes by microbatches, and each replica has its own; said once where there are several.

    self.calls += 1     self.average.lerp_(x.mean(0), 0.1)     u, v of a spectral norm     Layer.calls += 1

One process has it after all forwards of a step, each of several replicas after its own. Tables that are made where
there were none are no such state, and neither are the statistics of norms and the loads of experts, which replicas put
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..blocks.blocks import Parcel, State

_MOST_NAMED = 3


def state_named(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return what blocks were found to change, by its names."""
    return [*dict.fromkeys(name for name, _, _ in _own_state(blocks, parcels))]


def state_of_replicas(blocks: Sequence[nn.Module], parcels: Sequence[Parcel], *, buffers: bool) -> list[str]:
    """Return what of it replicas do not put together, by its names; `buffers`: these as well."""
    found = _own_state(blocks, parcels)
    return [
        *dict.fromkeys(
            name
            for name, module, state in found
            if not (state.is_new or isinstance(module, _NormBase)) and (state.is_attribute or buffers)
        )
    ]


def _own_state(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> Iterator[tuple[str, nn.Module | None, State]]:
    """Yield what users' modules in blocks, classes and globals have, and forwards change: its name, the module, if it
    is one's, and what it is.
    """
    for number, (block, parcel) in enumerate(zip(blocks, parcels, strict=True)):
        for state in parcel.state:
            if state.is_named:
                yield state.name, None, state
            if state.owner.startswith((".", " (")):
                path, _, rest = state.owner.partition(" (")
                module = block.get_submodule(path.removeprefix("."))
                if type(module).__module__.partition(".")[0] != __name__.partition(".")[0]:
                    place = f"{path}{rest.partition(')')[2]}{state.key and f'.{state.key}'}"
                    yield f"block {number} ({type(block).__name__}){place}", module, state


def replicas_line(found: Sequence[str], replicas: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or there is one replica."""
    if not found or replicas == 1:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which each of {replicas} replicas runs its own: it is not what one "
        "process has after all of them, nor what depends on it"
    )


def changed_line(found: Sequence[str], microbatches: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or a step has one microbatch."""
    if not found or microbatches < 2:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which a step has {microbatches}: it "
        "counts microbatches, not steps, and sees one at a time: let the training loop change what goes by steps"
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED])}{more}"
