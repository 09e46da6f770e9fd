"""An engine goes on from what ranks of another mesh have saved: each rank reads the boxes that it holds.

files of ranks 0 … 7, dp=2,pp=4 ──▶ SavedState ──▶ weights, averages     the boxes of this rank's masters or segments
                                              ──▶ optimizers' states    the same boxes where they have the weight's
                                                                        shape; else whole
                                              ──▶ steps, loss scale, and what lies beside, if all ranks had it alike
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError, nearest

from ..blocks.module_state import BESIDE as MODULES
from ..blocks.plain_values import is_text
from ..interchange.boxes import Placement
from ..interchange.exchange import Exchange
from ..interchange.held import HeldTensor
from ..interchange.save_dcp import STEP
from ..optim.kept import KeptMemory, kept_of
from ..optim.own_state import BESIDE as OPTIMIZERS
from ..state.state_dict import MARK, same
from ..weights.average import DECAY, WeightAverage, require_order
from .layout import layout_of, stored
from .saved_state import AVERAGE, MODEL, STATE, SavedState

PROGRESS = "engine."
"""How names begin of what is not of a weight: the number of steps, the scale of losses."""


@torch.no_grad()
def load_saved(saved: SavedState, exchange: Exchange, averages: Sequence[WeightAverage]) -> dict[str, Tensor]:
    """Let an engine's weights, optimizers and averages be those of a saved state; return its progress (collective).

    Raises, on all ranks alike, `MisfitError` for the state of another model, or of several saves, `UsageError` for
    averages that the engine does not keep, `InputError` for files that lack numbers.
    """
    with exchange.writing() as held:
        loader = _Loader(saved, exchange, averages)
        exchange.everyone.together(lambda: loader.require(held))
        exchange.everyone.together(lambda: loader.load(held))
        exchange.everyone.together(loader.load_beside)
    return {name: saved.whole(name) for name in saved.pieces if name.startswith(PROGRESS)}


def require_of_any_mesh(saved: SavedState, name: str) -> None:
    """Raise `MisfitError` for what lies beside tensors of weights, if ranks, or optimizers of one, had it otherwise."""
    saved.require_alike(name)
    if name.startswith(f"{OPTIMIZERS}{MARK}"):
        raise MisfitError(
            f"{saved.paths[0].parent}: {name!r} differs between the optimizers of a rank, so that nobody can say what "
            "it is on another mesh; resume on the mesh that wrote it"
        )


class _Loader:
    """One rank's reading."""

    def __init__(self, saved: SavedState, exchange: Exchange, averages: Sequence[WeightAverage]) -> None:
        self._saved, self._exchange, self._averages = saved, exchange, averages
        own = exchange.names.own or {}
        self._called = {
            name: list(dict.fromkeys(chain.from_iterable((one, own.get(one, one)) for one in (name, *group))))
            for name, group in exchange.names.groups().items()
        }

    def require(self, held: Sequence[HeldTensor]) -> None:
        """Raise where files are of several saves, or of another model, in names, shapes, or averages."""
        self._saved.require_one_save()
        found = [name for name in self._saved.pieces if name.startswith(MODEL)]
        known = {MODEL + called for names in self._called.values() for called in names}
        odd = [name for name in found if name not in known]
        if odd:
            raise MisfitError(self._of_another_model(odd[0], known))
        for one in held:
            name, shape = self._find(MODEL, one.name), one.placement.shape
            if name is None:
                raise MisfitError(self._of_another_model(MODEL + one.name, found))
            if self._saved.shape(name) != shape:
                raise MisfitError(
                    f"{self._where}: {one.name} is {self._saved.shape(name)} in the checkpoint, {shape} in the model"
                )
            if one.numbers is not None:
                for called in filter(None, (self._find(p, one.name) for p in (MODEL, *self._averaged()))):
                    self._saved.require_kind(called, one.name, one.numbers.dtype)
        self._exchange.state.require_beside([*self._saved.pieces, *self._of_modules()])
        decays = {number: f"{AVERAGE}{number}.{DECAY}" for number in range(len(self._averages))}
        known_decays = {n: self._saved.whole(name) for n, name in decays.items() if name in self._saved.pieces}
        require_order(self._averages, known_decays)
        kept = {name.split(".")[1] for name in self._saved.pieces if name.startswith(AVERAGE)}
        if len(kept) > len(self._averages):
            raise UsageError(
                f"{self._where}: the checkpoint has {len(kept)} averages of weights, the engine {len(self._averages)}; "
                "call engine.ema(decay) before it is loaded"
            )

    def _averaged(self) -> list[str]:
        return [f"{AVERAGE}{number}." for number in range(len(self._averages))]

    @property
    def _where(self) -> str:
        return str(self._saved.paths[0].parent)

    def _of_another_model(self, name: str, others: Sequence[str] | set[str]) -> str:
        near = nearest(name, others)
        return (
            f"{self._where}: the checkpoint is of another model: {name.removeprefix(MODEL)!r} is only on one side{near}"
        )

    def _find(self, prefix: str, name: str) -> str | None:
        """Return what the checkpoint calls a tensor of a weight, or of one that is tied to it; None: it has none."""
        return next((prefix + one for one in self._called[name] if prefix + one in self._saved.pieces), None)

    def load(self, held: Sequence[HeldTensor]) -> None:
        """Read all that this rank holds."""
        homes = {
            name: (stage.index, parameter)
            for stage in self._exchange.model.stages.values()
            for name, parameter in stage.named_weights().items()
        }
        for one in {id(one.tensor): one for one in reversed(held)}.values():
            if one.numbers is None:
                continue
            placement, numbers = stored(one.placement, one.numbers), one.numbers.detach()
            self._fill(MODEL, one.name, placement, numbers)
            if one.name not in homes:
                continue
            for number, average in enumerate(self._averages):
                mine = average.of(one.name)
                if mine is not None and not self._fill(f"{AVERAGE}{number}.", one.name, placement, mine):
                    mine.copy_(numbers)  # it begins anew
            self._load_state(one, placement, *homes[one.name])
        for number, average in enumerate(self._averages):
            name = f"{AVERAGE}{number}.updates"
            if name in self._saved.pieces:
                average.updates = int(self._saved.whole(name))

    def _fill(self, prefix: str, name: str, placement: Placement, numbers: Tensor) -> bool:
        """Read a tensor of a weight's shape; return whether the checkpoint has it."""
        found = self._find(prefix, name)
        if found is not None:
            self._saved.fill(found, list(placement.boxes(numbers)))
        return found is not None

    def _load_state(self, one: HeldTensor, placement: Placement, stage: int, parameter: torch.nn.Parameter) -> None:
        """Read what an optimizer keeps for a weight: its keys are those of the checkpoint."""
        kept = self._exchange.state.kept_for(stage, parameter)
        if kept.handle is None:
            return
        placement = placement if kept.is_shard else placement.gathered()
        shape = kept.handle.shape if kept.is_shard else torch.Size(placement.shape)
        weight = next((called for called in self._called[one.name] if self._saved.keys_of(called)), None)
        memory = KeptMemory(kept.state if self._saved.has_states else {}, kept.handle)
        flat: dict[str, Tensor] = {}
        for key in self._saved.keys_of(weight) if weight is not None else ():
            name = f"{STATE}{weight}.{key}"
            if is_text(key):
                value = self._text(name, placement)
            elif name in self._saved.beside:
                value = self._beside(name, placement)
            elif self._saved.shape(name) == placement.shape and shape:
                value = memory.take(key, shape, self._saved.dtype(name), torch.device("cpu"))
                self._saved.fill(name, list(placement.boxes(value)))
            else:
                value = self._whole(name, placement)
            flat[key] = value.to(kept.step_device if key == "step" else kept.handle.device)
        kept.state.update(kept_of(flat, kept.handle.device))

    def _text(self, name: str, placement: Placement) -> Tensor:
        """Return a value that is no tensor: of a rank that had the same boxes, or what all ranks have."""
        pieces = self._saved.beside.get(name, [])
        mine = next((p for p in pieces if list(_places(p.placement)) == list(_places(placement))), None)
        if mine is None and any(not same(piece.whole(), pieces[0].whole()) for piece in pieces[1:]):
            raise MisfitError(self._has_no_place(name, pieces[0].whole().shape, placement))
        if not pieces:
            self._saved.require_alike(name)
        return self._saved.whole(name) if not pieces else (mine or pieces[0]).whole()

    def load_beside(self) -> None:
        """Read what modules and optimizers keep beside tensors of weights."""
        names = [name for name in self._saved.pieces if name.startswith((MODULES, OPTIMIZERS))]
        try:
            for name in names:
                require_of_any_mesh(self._saved, name)
            found = {name: self._saved.whole(name) for name in names}
        except MisfitError:
            path = self._own_file()
            if path is None:
                raise
            found = {n: p.whole() for n in names for p in self._saved.pieces[n] if p.path == path}
        self._exchange.state.load_beside({**self._of_modules(), **found})

    def _of_modules(self) -> dict[str, Tensor]:
        """Return what modules here give beside tensors, where the checkpoint has weights alone: it stays."""
        if STEP in self._saved.pieces or any(name.startswith(MODULES) for name in self._saved.pieces):
            return {}
        return {name: kept for name, kept in self._exchange.state.read_beside().items() if name.startswith(MODULES)}

    def _own_file(self) -> Path | None:
        """Return the file of the rank that held what this rank holds, cut alike; None: there was none."""
        mine = layout_of(self._exchange, [])
        names = {MODEL + one.name for one in self._exchange.held() if one.numbers is not None}
        for path, theirs in zip(self._saved.paths, self._saved.layouts, strict=True):
            pieces = self._saved.pieces.items()
            held = {name for name, of in pieces if name.startswith(MODEL) and any(p.path == path for p in of)}
            if theirs.replica == mine.replica and theirs.holds_as(mine) and names == held:
                return path
        return None

    def _whole(self, name: str, placement: Placement) -> Tensor:
        """Return a state that has not its weight's shape, of which a whole weight needs all."""
        value = self._saved.whole(name)
        if value.dim() and not placement.is_whole:
            raise MisfitError(self._has_no_place(name, value.shape, placement))
        return value

    def _beside(self, name: str, placement: Placement) -> Tensor:
        """Return a state of a rank that had the same boxes of the weight."""
        mine = list(_places(placement))
        for piece in self._saved.beside[name]:
            if list(_places(piece.placement)) == mine:
                return piece.whole()
        raise MisfitError(self._has_no_place(name, self._saved.beside[name][0].whole().shape, placement))

    def _has_no_place(self, name: str, shape: Sequence[int], placement: Placement) -> str:
        return (
            f"{self._where}: {name!r} is {tuple(shape)}, and its weight {placement.shape}: nobody can say which part "
            "belongs to a shard of the weight; resume with the tp and the ZeRO stage that wrote it"
        )


def _places(placement: Placement) -> Iterator[tuple[tuple[int, ...], torch.Size]]:
    outline = torch.empty(placement.local, device="meta")
    numbers = outline if placement.span is None else outline.reshape(-1)[slice(*placement.span)]
    return ((box.offsets, box.numbers.shape) for box in placement.boxes(numbers))
