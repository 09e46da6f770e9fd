"""Loading of a saved state, of whatever mesh, format or program, into an engine: each rank reads the boxes it holds.

    SavedState ──▶ weights, averages     the boxes of this rank's masters or ZeRO segments
               ──▶ optimizers' states    the same boxes where they have the weight's shape; else whole
               ──▶ steps, loss scale, and further state of modules and optimizers, if equal on all ranks

A state that has "engine.step" is that of a training, and is taken over whole; of weights alone, optimizers stay as they
are. Averages that it lacks begin anew with the weights. A rank that only runs forward takes weights and what modules
keep, and passes over what optimizers and averages have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError, nearest

from ..blocks.plain_values_as_tensors import is_text
from ..blocks.state_dict_entries import MODULE_KEYS
from ..optim.optimizer_extra_state import OPTIMIZER_KEYS
from ..optim.optimizer_state import KeptMemory, kept_of
from ..weights_and_gradients.rank_state_dict import MARK, same
from ..weights_and_gradients.training_state import KeptState
from .index_ranges_in_full_tensors import StateLayout, TensorPlacement
from .rank_tensor_inventory import HeldTensor, RankTensors, state_placement
from .saved_state import AVERAGE, MODEL, STATE, STEP, SavedState
from .weight_averages import DECAY

_BESIDE = (MODULE_KEYS, OPTIMIZER_KEYS)


def require_of_any_mesh(saved: SavedState, name: str) -> None:
    """Raise `MisfitError` for module or optimizer state that differs between ranks, or between a rank's optimizers."""
    saved.require_alike(name)
    if name.startswith(f"{OPTIMIZER_KEYS}{MARK}"):
        raise MisfitError(
            f"{saved.where}: {name!r} differs between the optimizers of a rank, so that nobody can say what "
            "it is on another mesh; resume on the mesh that wrote it"
        )


class StateLoader:
    """Loader of a saved state into one rank.

    Args:
        saved: the state.
        rank: the rank's tensors that it is loaded into.
        is_part: whether weights may be missing (they keep their values) or extra.
        takes_states: whether the optimizers' states are loaded too.
    """

    def __init__(
        self, saved: SavedState, rank: RankTensors, *, is_part: bool = False, takes_states: bool = True
    ) -> None:
        self._saved, self._rank, self._is_part = saved, rank, is_part
        self._is_training = STEP in saved.pieces
        takes_states = takes_states and rank.trains
        self._takes_states = takes_states and (self._is_training or bool(saved.states))
        self._kinds = _BESIDE if takes_states else (MODULE_KEYS,)
        own = rank.names.own or {}
        self._called = {
            name: list(dict.fromkeys(chain.from_iterable((one, own.get(one, one)) for one in (name, *group))))
            for name, group in rank.names.groups().items()
        }

    def load_state(self, together: Callable[[Callable[[], None]], None] = lambda work: work()) -> None:
        """Load the state (collective where weights are sharded); with `together`, all ranks fail alike.

        Raises, before anything is changed, `MisfitError` for the state of another model, or of several saves,
        `UsageError` for averages that the engine does not keep; `InputError` for files that lack numbers.
        """
        beside: dict[str, Tensor] = {}
        together(self._require)
        together(lambda: beside.update(self._read_beside()))
        held, training = self._rank.held(), self._rank.training
        with torch.no_grad(), training.writing():
            together(lambda: training.beside.load_modules(beside) if beside else None)
            together(lambda: self._load(held))
            together(lambda: training.beside.load_optimizers(beside) if self._has_beside else None)

    def _require(self) -> None:
        """Raise where pieces are of several saves, or of another model: names, shapes, or averages."""
        saved, held = self._saved, self._rank.held()
        saved.require_one_save()
        if not self._is_part:
            self._require_names(held)
        for one in held:
            names = (self._find(prefix, one.name) for prefix in (MODEL, *self._averaged()))
            for name in filter(None, names):
                self._require_fit(name, one)
        if not self._rank.trains:
            return
        decays = {n: f"{AVERAGE}{n}.{DECAY}" for n in range(len(self._rank.averages.all))}
        found = {number: saved.whole(name) for number, name in decays.items() if name in saved.pieces}
        kept = {name.split(".")[1] for name in saved.pieces if name.startswith(AVERAGE)}
        self._rank.averages.require_loadable(saved.where, len(kept), found)

    def _require_names(self, held: Sequence[HeldTensor]) -> None:
        known = {called for names in self._called.values() for called in names}
        found = {name.removeprefix(MODEL) for name in self._saved.pieces if name.startswith(MODEL)}
        lacking = [one.name for one in held if one.numbers is not None and self._find(MODEL, one.name) is None]
        odd = [*sorted(found - known), *lacking]
        if odd:
            near = nearest(odd[0], known if odd[0] in found else found)
            raise MisfitError(
                f"{self._saved.where}: the state is of another model: {odd[0]!r} is only on one side{near}"
            )
        for weight in self._saved.states.keys() - known:
            raise MisfitError(
                f"{self._saved.where}: the state is of another optimizer, model or stage: {STATE + weight!r} is of no "
                "weight here"
            )

    def _require_fit(self, name: str, one: HeldTensor) -> None:
        """Raise `MisfitError` for a tensor of another shape, or kind of dtype, than the weight it is for."""
        found, wanted, piece = self._saved.shape(name), one.placement.shape, self._saved.pieces[name][0]
        if piece.stored.is_turned:
            found, wanted = found[::-1], wanted[::-1]
        if found != wanted:
            axes = [axis for axis, (has, needs) in enumerate(zip(found, wanted, strict=False)) if has != needs]
            fault = f"axis {axes[0]} differs" if len(found) == len(wanted) else "it has other axes"
            raise MisfitError(f"{piece.where}: {piece.name!r} is {found}, but {one.name} needs {wanted}: {fault}")
        if one.numbers is not None:
            self._saved.require_kind(name, one.name, one.numbers.dtype)

    def _averaged(self) -> list[str]:
        return [f"{AVERAGE}{number}." for number in range(len(self._rank.averages.all))]

    def _find(self, prefix: str, name: str) -> str | None:
        """Return the state's name of a weight, or of one tied to it, under a prefix; None: it has none."""
        return next((prefix + one for one in self._called[name] if prefix + one in self._saved.pieces), None)

    def _load(self, held: Sequence[HeldTensor]) -> None:
        """Read all tensors that this rank holds."""
        for one in {id(one.tensor): one for one in reversed(held)}.values():
            if one.numbers is None:
                continue
            numbers = one.numbers.detach()
            self._fill(MODEL, one, numbers)
            for prefix, average in zip(self._averaged(), self._rank.averages.all, strict=True):
                mine = average.average_of(one.name)
                if mine is not None and not self._fill(prefix, one, mine) and not self._is_part:
                    mine.copy_(numbers)
            kept = self._rank.kept(one) if self._takes_states else None
            if kept is not None:
                self._load_states(one, kept)
        for prefix, average in zip(self._averaged(), self._rank.averages.all, strict=True):
            if f"{prefix}updates" in self._saved.pieces:
                average.updates = int(self._saved.whole(f"{prefix}updates"))

    def _fill(self, prefix: str, one: HeldTensor, numbers: Tensor) -> bool:
        """Read a tensor of a weight's shape; return whether the state has it."""
        found = self._find(prefix, one.name)
        if found is not None:
            self._saved.fill(found, list(one.placement.boxes(numbers)))
        return found is not None

    def _load_states(self, one: HeldTensor, kept: KeptState) -> None:
        """Read the optimizer's state of a weight, with the keys that the saved state has."""
        assert kept.handle is not None
        placement = state_placement(one, kept)
        weight = next((called for called in self._called[one.name] if called in self._saved.states), "")
        memory = KeptMemory(kept.state, kept.handle)
        flat: dict[str, Any] = {}
        for key in self._saved.states.get(weight, ()):
            name, home = f"{STATE}{weight}.{key}", kept.home_of(key)
            if name in self._saved.values:
                flat[key] = self._saved.values[name]()
                continue
            is_cut = name in self._saved.pieces and self._saved.shape(name) == placement.shape and placement.shape
            if is_cut and not is_text(key):
                flat[key] = memory.take_tensor(key, placement.held, self._saved.dtype(name), home)
                self._saved.fill(name, list(placement.boxes(flat[key])))
                continue
            value = (
                self._whole(name, key, placement) if name in self._saved.pieces else self._beside(name, key, placement)
            )
            flat[key] = memory.take_tensor(key, value.shape, value.dtype, home).copy_(value)
        kept.state.update(kept_of(flat, kept.handle.device))

    def _whole(self, name: str, key: str, placement: TensorPlacement) -> Tensor:
        """Return a state of another shape than its weight's: it is read whole, so the weight must be whole too."""
        if is_text(key):
            self._saved.require_alike(name)
        value = self._saved.whole(name)
        if value.dim() and not placement.is_whole and not is_text(key):
            raise self._no_place(name, value, placement)
        return value

    def _beside(self, name: str, key: str, placement: TensorPlacement) -> Tensor:
        """Return a state of a rank that had the same boxes of the weight, or a value that is equal on all ranks."""
        pieces = self._saved.beside[name]
        mine = next((piece for piece in pieces if list(_places(piece.placement)) == list(_places(placement))), None)
        values = [piece.whole() for piece in (pieces if mine is None else [mine])]
        if mine is None and not (is_text(key) and all(same(value, values[0]) for value in values)):
            raise self._no_place(name, values[0], placement)
        return values[0]

    def _no_place(self, name: str, value: Tensor, placement: TensorPlacement) -> MisfitError:
        return MisfitError(
            f"{self._saved.where}: {name!r} is {tuple(value.shape)}, and its weight {placement.shape}: nobody can say "
            "which part belongs to a shard of the weight; resume with the tp and the ZeRO stage that wrote it, or take "
            "the weights alone"
        )

    @property
    def _has_beside(self) -> bool:
        """Whether the state covers further state of modules or optimizers; that of a training always does."""
        return self._is_training or any(name.startswith(self._kinds) for name in self._saved.pieces)

    def _read_beside(self) -> dict[str, Tensor]:
        """Return the further state of modules and optimizers, once it is checked."""
        if not self._has_beside:
            return {}
        names = [name for name in self._saved.pieces if name.startswith(self._kinds)]
        kept = self._kept_beside()
        self._rank.training.beside.require([*names, *kept])
        try:
            for name in names:
                require_of_any_mesh(self._saved, name)
            return {**kept, **{name: self._saved.whole(name) for name in names}}
        except MisfitError:
            own = self._own_layout()
            if own is None:
                raise
            return {**kept, **{n: p.whole() for n in names for p in self._saved.pieces[n] if p.layout is own}}

    def _kept_beside(self) -> dict[str, Tensor]:
        """Return the present further state of modules and optimizers, of the kinds that the saved state lacks."""
        there = {kind for kind in self._kinds if any(name.startswith(kind) for name in self._saved.pieces)}
        stays = [kind for kind in _BESIDE if kind not in there and not (self._is_training and kind in self._kinds)]
        mine = self._rank.training.beside.read_tensors() if stays else {}
        return {name: kept for name, kept in mine.items() if name.startswith(tuple(stays))}

    def _own_layout(self) -> StateLayout | None:
        """Return the layout of the saving rank with the same weights, sharded alike; None: there was none."""
        held = {MODEL + one.name for one in self._rank.held() if one.numbers is not None}
        mine = self._rank.layout(dict.fromkeys(held, ()))
        for layout in self._saved.layouts:
            named = self._saved.pieces.items()
            names = {n for n, pieces in named if n.startswith(MODEL) and any(p.layout is layout for p in pieces)}
            if layout.replica == mine.replica and layout.holds_as(mine) and names == held:
                return layout
        return None


def _places(placement: TensorPlacement) -> Iterator[tuple[tuple[int, ...], torch.Size]]:
    return ((box.offsets, box.numbers.shape) for box in placement.boxes(torch.empty(placement.held, device="meta")))
