"""The state of a training in full tensors, which any mesh can take over.

    rank 0  [ segment, shard 0 of tp ]─┐  replicas   ┌──────────────┐  tp   ┌──────────────────────┐
    rank 1  [ segment, shard 0 of tp ]─┴───────────▶ │ shard 0 of tp│ ────▶ │ "3.attn.qkv.weight"  │
                                                     └──────────────┘       └──────────────────────┘

"model.<name>" are weights (of bf16 and fp16 the float32 masters) and buffers, "optimizer.<name>.<key>" what the
optimizer keeps, "ema.<number>.<name>" averages. What has the shape of the parameter is cut as the parameter is; all
else, such as counts of steps and Adafactor's factors, is whole on some replica, and goes as it is. So does what modules
and optimizers keep beside, "engine.module.…" and "engine.optimizer.…", if all ranks have it alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, nearest

from ..blocks.dtensor import is_sharded
from ..blocks.module_state import saved_tensors
from ..blocks.number_types import require_kind
from ..blocks.plain_values import is_text
from ..comm import Group
from ..comm.control import share_texts
from ..optim.kept import KeptMemory, flat_of, kept_of
from ..optim.own_state import BESIDE
from ..parallel.mesh_groups import MeshGroups
from ..parallel.tensor.shard import gather_full, shard_of, take_shard
from ..stage.build import Stage
from ..stage.rank_model import RankModel
from ..state.state_dict import OPTIMIZER, require_alike
from ..state.training_state import TrainingState
from .average import DECAY, WeightAverage, require_order


class FullState:
    """Gathers the state of one rank's stages, and takes it over; all ranks call each method together."""

    def __init__(
        self, model: RankModel, state: TrainingState, groups: MeshGroups, averages: Sequence[WeightAverage]
    ) -> None:
        self._model, self._state, self._groups, self._averages = model, state, groups, averages
        if any(is_sharded(block) for block in model.outlines):
            raise MisfitError("the model has modules that PyTorch has sharded (DTensor); save it by PyTorch's DCP")

    def gather(self) -> dict[str, Tensor]:
        """Return full tensors of this rank's blocks, on the CPU."""
        self._state.weights.settle()
        full = {name: tensor.detach().cpu() for name, tensor in self._gathered()}
        beside = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._state.read_beside().items()}
        require_alike(beside, self._groups.world)
        return {**full, **beside}

    def gather_all(self) -> dict[str, Tensor]:
        """Return full tensors of all blocks, on every rank."""
        mine, world = self.gather(), self._groups.world
        specs = {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in mine.items()}
        homes: dict[str, tuple[int, list[object]]] = {}
        for rank, text in enumerate(share_texts(world, json.dumps(specs))):
            for name, spec in json.loads(text).items():
                homes.setdefault(name, (rank, spec))
        return {name: _shared(mine.get(name), *homes[name], world) for name in sorted(homes)}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self._model.stages.values():
            trained = stage.named_weights()
            for full_name, tensor in saved_tensors(stage).items():
                name = full_name.removeprefix("blocks.")
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    yield f"model.{name}", self._full(tensor, self._state.masters.of(tensor))
                else:
                    yield f"model.{name}", gather_full(tensor, self._groups.tensor)
            for name, parameter in trained.items():
                for number, average in enumerate(self._averages):
                    yield f"ema.{number}.{name}", self._full(parameter, average.of(name))
                yield from self._optimizer_state(stage, name, parameter)
        for number, average in enumerate(self._averages):
            yield f"ema.{number}.updates", torch.tensor(average.updates)
            yield f"ema.{number}.{DECAY}", average.saved_decay

    def _full(self, parameter: nn.Parameter, held: Tensor | None) -> Tensor:
        """Return the full tensor of which this rank holds what it steps of a parameter, or something like it."""
        span, dtype = self._state.masters.span_of(parameter), self._state.stepped_dtype(parameter)
        whole = held
        if self._state.weights:
            flat = torch.full((parameter.numel(),), -0.0, dtype=dtype, device=parameter.device)
            if span is not None and held is not None:
                flat[slice(*span)] = held.detach().flatten()
            self._state.replicas_of(parameter).all_reduce(flat).wait()  # the others add nothing
            whole = flat.view(parameter.shape)
        assert whole is not None
        return gather_full(whole, self._groups.tensor, shard_of(parameter))

    def _optimizer_state(self, stage: Stage, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yield what optimizers keep for a parameter; which that is, replicas tell each other."""
        kept = self._state.kept_for(stage.index, parameter)
        handle = kept.handle
        mine: dict[str, list[object]] = {}
        flat = flat_of(kept.state, name)
        for key, tensor in flat.items():
            cut = kept.is_shard and handle is not None and tensor.dim() > 0 and tensor.shape == handle.shape
            cut = cut and not is_text(key)
            mine[key] = [cut, str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        group = self._state.replicas_of(parameter)
        homes: dict[str, tuple[int, list[object]]] = {}
        texts = share_texts(group, json.dumps(mine)) if self._state.weights else [json.dumps(mine)] * group.size
        for rank, text in enumerate(texts):
            for key, spec in json.loads(text).items():
                homes.setdefault(key, (rank, spec))
        for key, (rank, (is_cut, *spec)) in sorted(homes.items()):
            value = flat.get(key)
            if is_cut:
                yield f"optimizer.{name}.{key}", self._full(parameter, value)
            elif self._state.weights:
                yield f"optimizer.{name}.{key}", _shared(value, rank, spec, group)
            elif value is not None:
                yield f"optimizer.{name}.{key}", value.clone()

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Take this rank's slices of a state; without `strict`, what it lacks stays as it is. Raises `MisfitError`."""
        decays = {number: state.get(f"ema.{number}.{DECAY}") for number in range(len(self._averages))}
        require_order(self._averages, {number: decay for number, decay in decays.items() if decay is not None})
        has_optimizers = any(name.startswith(OPTIMIZER) for name in state)
        with self._state.writing():
            for stage in self._model.stages.values():
                for full_name, tensor in saved_tensors(stage).items():
                    self._load_tensor(state, full_name.removeprefix("blocks."), tensor, strict=strict)
                for name, parameter in stage.named_weights().items():
                    if has_optimizers:
                        self._load_optimizer(state, stage, name, parameter)
                    for number, average in enumerate(self._averages):
                        held, found = average.of(name), self._find(state, f"ema.{number}.", name)
                        if held is not None and found is not None:
                            require_kind("the state", f"ema.{number}.{name}", found.dtype, "the average", held.dtype)
                            held.copy_(self._mine(parameter, found, held.dtype).view_as(held))
            if strict:
                self._load_beside(state, has_optimizers=has_optimizers)
        for number, average in enumerate(self._averages):
            average.updates = int(state.get(f"ema.{number}.updates", average.updates))

    def _load_beside(self, state: Mapping[str, Tensor], *, has_optimizers: bool) -> None:
        """Take over what modules and optimizers keep beside; where the state has weights alone, theirs stays."""
        mine = {name: tensor for name, tensor in self._state.read_beside().items() if name not in state}
        kept = {name: tensor for name, tensor in mine.items() if not has_optimizers and name.startswith(BESIDE)}
        self._state.load_beside({**kept, **state})

    def _load_tensor(self, state: Mapping[str, Tensor], name: str, tensor: Tensor, *, strict: bool) -> None:
        found = self._find(state, "model.", name)
        if found is None:
            if strict:
                raise MisfitError(f"the state has no 'model.{name}'{nearest(f'model.{name}', state)}")
            return
        wanted = _full_shape(tensor)
        if list(found.shape) != wanted:
            raise MisfitError(
                f"'model.{name}' is {tuple(found.shape)} in the state, but the model's is {tuple(wanted)}"
            )
        require_kind("the state", f"model.{name}", found.dtype, "the model's", tensor.dtype)
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(found)
            return
        master = self._state.masters.of(tensor)
        if master is not None:
            master.copy_(self._mine(tensor, found, master.dtype).view_as(master))

    def _load_optimizer(self, state: Mapping[str, Tensor], stage: Stage, name: str, parameter: nn.Parameter) -> None:
        kept = self._state.kept_for(stage.index, parameter)
        if kept.handle is None:
            return
        names = [name, *self._ties(name)]
        prefix = next((p for p in (f"optimizer.{n}." for n in names) if any(key.startswith(p) for key in state)), None)
        memory = KeptMemory(kept.state, kept.handle)
        flat: dict[str, Tensor] = {}
        for full_key, found in state.items():
            if prefix is None or not full_key.startswith(prefix):
                continue
            key = full_key.removeprefix(prefix)
            is_cut = kept.is_shard and found.dim() > 0 and list(found.shape) == _full_shape(parameter)
            if is_cut and not is_text(key):
                found = self._mine(parameter, found, found.dtype).view_as(kept.handle)
            home = kept.step_device if key == "step" else kept.handle.device
            flat[key] = memory.take(key, found.shape, found.dtype, home).copy_(found)
        kept.state.update(kept_of(flat, kept.handle.device))

    def _mine(self, parameter: nn.Parameter, full: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what this rank steps of a full tensor: flat where replicas hold shards."""
        shard, span = shard_of(parameter), self._state.masters.span_of(parameter)
        mine = (
            full.to(parameter.device, dtype) if shard is None else take_shard(full, shard).to(parameter.device, dtype)
        )
        return mine if span is None else mine.flatten()[slice(*span)]

    def _find(self, state: Mapping[str, Tensor], prefix: str, name: str) -> Tensor | None:
        """Return a tensor by its name, or by that of a weight that is tied to it."""
        return next((state[prefix + one] for one in (name, *self._ties(name)) if prefix + one in state), None)

    def _ties(self, name: str) -> list[str]:
        return [other for names in self._model.tied.names.values() if name in names for other in names if other != name]


def _full_shape(tensor: Tensor) -> list[int]:
    shape, shard = list(tensor.shape), shard_of(tensor)
    if shard is not None:
        shape[shard.dim] *= shard.size
    return shape


def _shared(mine: Tensor | None, source: int, spec: Sequence[object], group: Group) -> Tensor:
    """Return the tensor that the member `source` has, on the CPU."""
    name, *shape = spec
    dtype = getattr(torch, str(name))
    sent = torch.empty([int(str(size)) for size in shape], dtype=dtype, device=group.device)
    if mine is not None and group.index == source:
        sent.copy_(mine)
    sent = sent.reshape(-1)
    group.broadcast(sent, source).wait()
    return sent.view([int(str(size)) for size in shape]).cpu()
