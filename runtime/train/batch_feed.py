"""Batches of a training: from a data set in memory or token shards, or from the user's data loaders.

data set    first and last stages read it, each rank its replica's samples of batches that all ranks know; those of
            token shards are read ahead, and all stages read where documents end, if attention is kept within them
map-style   every rank reads those of its replica; the order goes by seed and epoch alone, so that a run resumes at the
            same sample on any mesh
loaders     every rank has those of its replica

Loops over loaders of unequal length: a rank without further batches takes part with no samples, until all have ended.

replica 0    batch 0   batch 1   batch 2   end
replica 1    batch 0   (none)    (none)    end           the numbers are those of one process with four batches' samples
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from quintsched.check_call_arguments import SEVERAL, ours, takes
from quintsched.errors import MisfitError, UsageError, counted
from quintsched.plan import Plan

from ..agreement.refuse_unequal_ranks import Plain, Record, Section, require_same
from ..blocks.trees import map_tensors
from ..comm import Group, Transport
from ..comm.host_collectives import ControlGroup, broadcast_bytes
from ..data import (
    PADDING,
    BatchSampler,
    Dataset,
    DataSpec,
    TokenDataset,
    TokenSamples,
    gather_batch,
    has_extras,
    knows_replica,
    load_dataset,
)
from ..data.memory_dataset import Indices
from ..data.prefetch import prefetched
from ..data.user_loaders import MIXED, UNKNOWN_SPEC, LoadedBatch, LoaderFeed, Loaders, Say, batch_of, is_map_style
from ..engine_base import EngineBase
from ..settings.job_file import DataConfig, Samples, TrainConfig
from ..stage.batches.microbatches import most_rows, without_samples

SAME_DATA = "give all ranks the same data set"


def open_feed(data: DataConfig, train: TrainConfig, plan: Plan, transport: Transport) -> Feed:
    """Return the source of a job's data (collective); raises as loading does, `MisfitError` where replicas differ."""
    replica, world = _replica(plan, transport.rank), transport.world_group()
    needs = _needs_data(plan, transport.rank)
    together = ControlGroup(world).together
    found = together(lambda: load_dataset(data, *replica) if has_extras(data) or needs else None)
    said = {} if found is None else _described(found, data)
    section = Section.from_settings(said) if said else None
    require_same({"data": section}, world, "the data", SAME_DATA)
    dataset = found if isinstance(found, Dataset | TokenDataset) else None
    sizes = _broadcast_sizes(dataset, plan, transport)
    if sizes is not None and isinstance(dataset, TokenDataset):
        splits = dataset.train, dataset.validation
        return TokenFeed(splits, *sizes, train, replica, said, ahead=dataset.prefetch, needs=needs)
    if sizes is not None:
        read = (None, None) if dataset is None else (dataset.train, dataset.validation)
        return DatasetFeed(read, *sizes, train, replica, said, shuffles=dataset is not None)
    loaders = together(lambda: load_dataset(data, *replica) if found is None else found)
    assert isinstance(loaders, Loaders)
    if is_map_style(loaders.train):
        return _feed_of_maps(loaders, train, replica, world)
    return UserFeed(loaders, world)


def feed_of(
    train: Any, validation: Any, batches: int | None, settings: TrainConfig, plan: Plan, transport: Transport
) -> Feed:
    """Return a feed of objects (collective); see `Trainer` for what `train` and `validation` may be.

    Raises:
        UsageError: a loader that gives the same samples to all replicas, or a data set beside a loader.
        MisfitError: loaders of replicas, or data sets of ranks, differ in length.
    """
    share, world = _replica(plan, transport.rank), transport.world_group()
    if is_map_style(train):
        return _feed_of_maps(Loaders(train, validation), settings, share, world)

    def find() -> Loaders:
        given = _loader_of(train, "train", share)
        return (
            given
            if isinstance(given, Loaders)
            else Loaders(given, _loader_of(validation, "validation", share), batches=batches)
        )

    return UserFeed(ControlGroup(world).together(find), world)


def _feed_of_maps(found: Loaders, train: TrainConfig, share: tuple[int, int], world: Group) -> MapFeed:
    feed = ControlGroup(world).together(lambda: MapFeed(found.train, found.validation, train, share, found.spec))
    require_same({"data": Section.from_settings(feed.settings)}, world, "the data", SAME_DATA)
    return feed


def _loader_of(given: Any, name: str, share: tuple[int, int]) -> Any:
    """Return a loader of one replica's samples; raises `UsageError` for one that gives all replicas the same."""
    if callable(given) and not hasattr(given, "__iter__"):
        return given(*share)
    if is_map_style(given):
        raise UsageError(MIXED)
    sampled = getattr(getattr(given, "batch_sampler", None), "sampler", getattr(given, "sampler", None))
    if share[1] > 1 and isinstance(sampled, RandomSampler | SequentialSampler):
        raise UsageError(
            f"{name}: this DataLoader gives all {share[1]} replicas the same samples; give the data set itself, or "
            f"a function: {name}=lambda replica, replicas: DataLoader(data, batch_size, "
            "sampler=DistributedSampler(data, replicas, replica))"
        )
    return given


class DatasetFeed:
    """Data set in memory: a training and a validation split, both None on ranks that do not read them.

    Attributes:
        settings: properties of the data, where this rank reads them: a resumed run must have the same.
        num_batches: number of batches of an epoch.
        validates: whether there are batches of validation.
        is_last: whether the current batch is the last of several of an epoch, and so may be smaller.
        parts: most parts of a batch over which gradients are accumulated, so that all replicas have some of each.
    """

    is_of_loaders = is_last = False

    def __init__(
        self,
        splits: tuple[Any, Any],
        spec: DataSpec,
        counts: tuple[int, int],
        train: TrainConfig,
        replica: tuple[int, int],
        settings: Record,
        *,
        shuffles: bool = True,
    ) -> None:
        self.spec, self.settings, self._replica, self._seed = spec, settings, replica, train.seed
        self._splits, size, seed = splits, train.batch_size, train.seed
        self.parts = min(train.accumulate, max(size // replica[1], 1))
        self._train = BatchSampler(num_samples=counts[0], batch_size=size, seed=seed, shuffle=shuffles)
        self._validation = (
            BatchSampler(num_samples=counts[1], batch_size=size, seed=seed, shuffle=False) if counts[1] else None
        )
        self.num_batches, self.validates = self._train.num_batches, self._validation is not None

    def train(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        """Yield the batches of an epoch from number `start` on."""
        return self._batches(self._splits[0], self._train, epoch, start)

    def validation(self) -> Iterator[LoadedBatch]:
        """Yield all batches of validation, if there are any."""
        if self._validation is not None:
            yield from self._batches(self._splits[1], self._validation, 0, 0)

    def once(self, samples: Samples) -> Iterator[LoadedBatch]:
        """Yield this replica's part of a split, of which each sample is in one part, in order, batch by batch.

        Raises `MisfitError` where there is no validation, or fewer samples than replicas.
        """
        number, (replica, num_replicas) = samples == "validation", self._replica
        sampler = (self._train, self._validation)[number]
        if sampler is None:
            raise MisfitError("there is no data set of validation; return a pair of data sets, or say samples: train")
        count = sampler.num_samples
        if count < num_replicas:
            over = f"over {counted(num_replicas, 'replica')} (dp x ep); take a mesh with fewer"
            raise MisfitError(f"{counted(count, 'sample')} cannot be shared out {over}")
        mine, size = np.array_split(np.arange(count), num_replicas)[replica], self._train.batch_size
        for start in range(0, len(mine), each := max(size // num_replicas, 1)):
            split = self._splits[number]
            indices = mine[start : start + each]
            yield (None, None, {}) if split is None else self._gather(split, indices, 0)

    def _batches(self, split: Any, sampler: BatchSampler, epoch: int, start: int) -> Iterator[LoadedBatch]:
        """Yield this replica's samples of each batch, its share of each part; (None, None, {}) where it needs none."""
        for indices in sampler.batches(epoch, start=start):
            mine = self._mine(indices, self.parts if sampler is self._train else 1)
            yield (None, None, {}) if split is None else self._gather(split, mine, epoch)

    def _mine(self, indices: Indices, parts: int) -> Indices:
        replica, num_replicas = self._replica
        return np.concatenate([np.array_split(part, num_replicas)[replica] for part in np.array_split(indices, parts)])

    def _gather(self, split: Any, indices: Any, epoch: int) -> LoadedBatch:
        return *gather_batch(split, indices), {}

    def example(self, samples: int) -> Tensor:
        """Return inputs of so many samples, or zeros of their shape."""
        split = self._splits[0]
        inputs = None if split is None else self._gather(split, np.arange(samples) % len(split), 0)[0]
        return torch.zeros(samples, *self.spec.input_shape) if inputs is None else inputs

    def state(self) -> bytes | None:
        """Return None: batches follow from the epoch."""

    def restore(self, state: bytes | None, epoch: int, batch: int, say: Say) -> None:
        """Do nothing: batches follow from the epoch."""


class TokenFeed(DatasetFeed):
    """Token shards; batches are read ahead by a thread. Without `needs`, only the extras of a batch are read."""

    def __init__(self, *arguments: Any, ahead: int, needs: bool) -> None:
        super().__init__(*arguments, shuffles=False)  # samples have an order of their own
        self._ahead, self._needs = ahead, needs

    def _batches(self, split: Any, sampler: BatchSampler, epoch: int, start: int) -> Iterator[LoadedBatch]:
        return prefetched(super()._batches(split, sampler, epoch, start), self._ahead)

    def _gather(self, split: Any, indices: Any, epoch: int) -> LoadedBatch:
        samples: TokenSamples = split
        return samples.batch(indices, epoch, self._seed, ids=self._needs)


class MapFeed(DatasetFeed):
    """Map-style data sets of torch, whose samples torch's default collation joins; `validation` may be None.

    A smaller last batch is divided as evenly as can be, also where some replicas get no samples. Raises `UsageError`
    for a data set without samples, or with fewer in the first batch than there are replicas.
    """

    def __init__(
        self, train: Any, validation: Any, settings: TrainConfig, share: tuple[int, int], spec: DataSpec = UNKNOWN_SPEC
    ) -> None:
        if not (validation is None or is_map_style(validation)):
            raise UsageError(MIXED)
        count = len(train)
        if min(count, settings.batch_size) < share[1]:
            samples, replicas = counted(min(count, settings.batch_size), "sample"), counted(share[1], "replica")
            raise UsageError(f"batches of {samples} do not divide over {replicas}")
        counts = count, 0 if validation is None else len(validation)
        sizes = dict(zip(("data.training_samples", "data.validation_samples"), counts, strict=True))
        super().__init__((train, validation), spec, counts, settings, share, sizes)

    def _mine(self, indices: Indices, parts: int) -> Indices:
        return super()._mine(indices[indices != PADDING], parts)

    def _gather(self, split: Any, indices: Any, epoch: int) -> LoadedBatch:
        if not len(indices):
            return batch_of(without_samples(default_collate([split[0]])))
        return batch_of(default_collate([split[index] for index in indices.tolist()]))


class UserFeed:
    """Data loaders of one replica."""

    is_of_loaders, parts = True, sys.maxsize

    def __init__(self, loaders: Loaders, world: Group) -> None:
        self.spec = loaders.spec
        self.settings: Record = {}
        self._train = LoaderFeed(loaders.train, loaders.batches)
        self._validation = None if loaders.validation is None else LoaderFeed(loaders.validation, None, saves=False)
        self.num_batches = self._train.num_batches
        said = {
            "batches of training": self.num_batches,
            "batches of validation": 0 if self._validation is None else self._validation.num_batches,
        }
        self.validates = said["batches of validation"] > 0
        advice = "give each replica as many, or say Loaders(…, batches=…)"
        require_same({"loaders": Section.from_settings(said)}, world, "the lengths of their loaders", advice)

    def train(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        """Yield the batches of an epoch from number `start` on."""
        yield from self._train.epoch(epoch, start)

    def validation(self) -> Iterator[LoadedBatch]:
        """Yield all batches of validation, if there is a loader for it."""
        if self._validation is not None:
            yield from self._validation.epoch(0)

    def once(self, samples: Samples) -> Iterator[LoadedBatch]:
        """Yield all batches of validation, or of one epoch of training; raises `MisfitError` where there are none."""
        if samples == "train":
            return self.train(0, 0)
        if self._validation is None:
            raise MisfitError("the loaders have no validation; give Loaders(…, validation=…), or say samples: train")
        return self.validation()

    def example(self, samples: int) -> Tensor:
        """Return zeros of the shape of inputs."""
        return torch.zeros(samples, *self.spec.input_shape)

    @property
    def is_last(self) -> bool:
        """Whether the current batch is the last of several of an epoch, and so may be smaller."""
        return self._train.is_last

    def state(self) -> bytes | None:
        """Return the state of the training loader: its own, or the position to replay to."""
        return self._train.state()

    def restore(self, state: bytes | None, epoch: int, batch: int, say: Say) -> None:
        """Restore a state, or where there is none for as many replicas, skip the batches already used."""
        self._train.restore(state, epoch, batch, say)


Feed = DatasetFeed | UserFeed
"""Batches of one replica, for training and for validation."""


def _replica(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the number of a rank's replica of the batch, and how many replicas there are (dp x ep)."""
    at, mesh = plan.mesh.coordinates(rank), plan.mesh
    return at.get("dp", 0) * mesh.axis_size("ep") + at.get("ep", 0), mesh.axis_size("dp") * mesh.axis_size("ep")


def _needs_data(plan: Plan, rank: int) -> bool:
    """Whether a rank holds a first or last stage, and so reads the data."""
    held = plan.layout.stages_of(plan.mesh.pp_rank(rank))
    return any(stage in (route.stages[0], route.stages[-1]) for route in plan.routes for stage in held)


def _described(found: Dataset | TokenDataset | Loaders, config: DataConfig) -> dict[str, Plain]:
    """Return properties of the data, which must be equal on all ranks that read it."""
    if isinstance(found, Loaders):
        return {"data.kind": "loaders"}
    digests = {"data.training_digest": found.train.digest(), "data.validation_digest": found.validation.digest()}
    return {
        "data.training_samples": len(found.train),
        "data.validation_samples": len(found.validation),
        "data.input_shape": str(found.spec.input_shape),
        "data.classes": found.num_classes,
        **({} if knows_replica(config) else digests),
    }


def _broadcast_sizes(
    dataset: Dataset | TokenDataset | None, plan: Plan, transport: Transport
) -> tuple[DataSpec, tuple[int, int]] | None:
    """Broadcast the sizes of a data set from the first rank that reads data to all others; None: there are loaders."""
    source = next(rank for rank in range(plan.mesh.size) if _needs_data(plan, rank))
    mine: list[Any] = []
    if dataset is not None:
        mine = [dataset.spec.input_shape, dataset.num_classes, len(dataset.train), len(dataset.validation)]
    said = json.loads(broadcast_bytes(transport.world_group(), json.dumps(mine).encode(), source))
    if not said:
        return None
    shape, num_classes, num_train, num_validation = said
    return DataSpec(input_shape=tuple(shape), num_classes=num_classes), (num_train, num_validation)


def parts_of(batch: Any, count: int) -> list[Any]:
    """Return a batch in so many parts, of as even sizes as possible; a tensor without a row per sample stays whole."""
    samples = most_rows(batch)

    def part(number: int) -> Any:
        return map_tensors(
            lambda tensor: tensor.tensor_split(count)[number] if tensor.dim() and len(tensor) == samples else tensor,
            batch,
        )

    return [part(number) for number in range(count)] if count > 1 else [batch]


@takes("drained(loader, engine)", loader=SEVERAL, engine=ours("RankView"))
def drained(loader: Iterable[Any] | None, engine: EngineBase) -> Iterator[Any]:
    """Yield a loader's batches, then batches of no samples, until the loaders of all ranks have ended (collective).

    All ranks loop over this, each over its own loader, and do the same in every iteration: step, evaluate, save. Each
    iteration begins with an all-reduce of one number over all ranks.

    Args:
        loader: this rank's; None on a rank that needs no data: it yields (None, None).
        engine: the engine that the batches are for.

    Raises `UsageError` where a rank that needs data has no batch at all.
    """
    batches, nothing = iter(loader or ()), None
    while True:
        batch = next(batches, None)
        if not any(engine.everyone.add_numbers(float(batch is not None))):
            return
        if batch is not None:
            nothing = without_samples(batch) if nothing is None else nothing
            yield batch
        elif nothing is not None or loader is None:
            yield (None, None) if nothing is None else nothing
        else:
            raise UsageError("this rank's loader has no batch at all; give each replica one at least")
