"""Things that blocks and losses of stages hand on through objects and files, and state that goes by microbatches."""

import logging
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from quintsched.errors import MisfitError
from quintsched.runtime.guards.state_in_several_stages import SharedState

from ...helpers.blocks import of_kind
from ..trials import ones, step, taken


class Place:
    h = None

    def __init__(self):
        self.log, self.norms, self.calls, self.seen = [], {}, 0, set()


def counters_of(offsets):
    """Return functions that have variables around them: one that the first sets and the last reads, and their own."""
    shared = 0

    def set_shared():
        nonlocal shared
        shared += 1

    def own():
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls + offsets[0]

        return count

    return [set_shared, own(), own(), lambda: shared]


def layers_of(do):
    """Return layers that do something with a place that all have, by their numbers."""
    place, counters = Place(), counters_of([0.0])

    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.fc, self.number, self.aux = nn.Linear(3, 3), number, 0.0
            self.counter = counters[number]

        def forward(self, h):
            return do(self, place, self.fc(h))

    return [Layer(number) for number in range(4)]


def hand_on(layer, place, h):
    if layer.number == 0:
        place.h = h.detach()
    return h if layer.number != 3 or place.h is None else torch.cat([h, place.h]).tanh()[: len(h)]


def count_in(*numbers):
    """Return what layers do of which those of some numbers scale by what they have counted."""
    return lambda layer, place, h: h * (1 + (layer.counter() or 0)) if layer.number in numbers else h


def use_as_scratch(layer, place, h):
    place.h = h.mean()
    return h + place.h


def cache(layer, place, h):
    if place.h is None:
        place.h = torch.linspace(0, 1, 3)
    return h + place.h


def keep_aux(layer, place, h):
    layer.aux = h.square().mean()
    return h


def plain(layers):
    return nn.functional.mse_loss


def with_aux(layers):
    return lambda output, y: nn.functional.mse_loss(output, y) + sum(getattr(layer, "aux") for layer in layers)  # noqa: B009


def hand_on_a_number(layer, place, h):
    if layer.number == 1:
        place.h = float(h.detach().abs().mean())  # which a block says that needs data
    return h if layer.number != 3 else h * (1 + (place.h or 0.0))


def append_late(layer, place, h):
    if layer.number == 0 and layer.training and layer.aux:
        place.log.append(1)
    return h * (1 + len(place.log)) if layer.number == 3 else h


def add_at_once(layer, place, h):
    if layer.number == 0:
        place.seen.add(len(place.seen))
    return h * (1 + len(place.seen)) if layer.number == 3 else h


def append_in_backward(layer, place, h):
    if layer.number == 3 and h.requires_grad:
        h.register_hook(lambda grad: place.log.append(1))
    return h * (1 + len(place.log)) if layer.number == 0 else h


BEGINNING = [append_late, append_in_backward, add_at_once]


def steps_of(do, loss, steps=1):
    """Return how to train layers that do something, the first of them late."""

    def make():
        torch.manual_seed(0)
        return layers_of(do)

    def change(layers, number):
        layers[0].aux = number > 1

    return {"make": make, "batches": ones(4, 3, steps=steps), "change": change, "loss_of": loss, "schedule": "gpipe"}


def refusal(do, loss, steps):
    (said,) = {found[-1] for found in step(**steps_of(do, loss, steps))}
    return said


@pytest.mark.parametrize(
    ("do", "loss", "steps", "says"),
    [
        (hand_on, plain, 1, r"blocks 0 \(Layer\) and 3 \(Layer\) hand 'h' on through an object, .* stages 0 and 1"),
        (count_in(0, 3), plain, 1, r"blocks 0 \(Layer\) and 3 \(Layer\) hand 'shared' on through .* stages 0 and 1"),
        (keep_aux, with_aux, 1, r"block 0 \(Layer\), or what runs on .*, sets 'aux' in a .*, and the loss reads it"),
        (hand_on_a_number, plain, 2, r"block \d \(Layer\), or what runs on its stage, sets 'h' .* reads it on another"),
        *((do, plain, 4, r"block \d \(Layer\), or what runs on its stage, sets .*'") for do in BEGINNING),
    ],
)
def test_what_stages_hand_on_through_objects_is_refused(do, loss, steps, says):
    said = refusal(do, loss, steps)
    assert re.match(says, said)
    assert "pass it on in the forward" in said
    assert do not in BEGINNING or re.search(r"(log|seen)' .*, and block \d \(Layer\) reads it", said)


@pytest.mark.parametrize("do", [use_as_scratch, cache, count_in(1, 2)])
def test_what_each_block_makes_for_itself_may_be_in_one_object(do):
    taken(**steps_of(do, plain))


def count_beside(layer, place, h):
    if layer.number == 1:
        place.calls += 1
    return h


@pytest.mark.parametrize(
    ("do", "names"),
    [
        (keep_aux, "block 0 (Layer).aux, block 1 (Layer).aux, block 2 (Layer).aux and 1 more:"),
        (count_beside, "Layer.forward, place.calls:"),
    ],
)
def test_state_that_goes_by_microbatches_is_said(caplog, do, names):
    with caplog.at_level(logging.WARNING, "quintsched"):
        taken(**steps_of(do, plain))
    (line,) = [record.message for record in caplog.records if "counts microbatches" in record.message]
    assert line.startswith(names)
    assert "a step has 2" in line


FILE = Path("statistics")


class Writes(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place


class Reads(Writes):
    pass


def table_of(place):
    if "late" not in place.table:
        place.table["late"] = 1.0
    return place.table


def sets(layer, x):
    layer.place.table["late"] = 1.0


def sets_environment(layer, x):
    os.environ["SCALE"] = str(len(x))


def logs(layer, x):
    with open(FILE / str(len(x)), "a") as file:
        file.write("x")


def opens(layer, x):
    with FILE.open() as file:
        return x * float(file.read())


WRITES = {
    "an entry": sets,
    ".data": lambda layer, x: layer.place.scale.data.mul_(0.5),
    "by numpy": lambda layer, x: layer.place.scale.numpy().fill(3),
    "a saved array": lambda layer, x: np.save(FILE, x),
    "a log": logs,
    "environment": sets_environment,
}
READS = {
    "table": lambda layer, x: x * len(layer.place.table),
    "cache": lambda layer, x: x * table_of(layer.place)["late"],
    "scale": lambda layer, x: x * layer.place.scale,
    "a loaded tensor": lambda layer, x: x * torch.load(FILE),
    "an open file": opens,
    "environment": lambda layer, x: x * float(os.environ["SCALE"]),
}


def common_of(write, read):
    place = SimpleNamespace(table={}, scale=torch.ones(1))
    blocks = [of_kind(Writes, write)(place), of_kind(Reads, read)(place)]
    shared = SharedState(blocks, [range(1), range(1, 2)])
    return blocks[0], shared.common({0: blocks[0]})


@pytest.mark.parametrize(
    ("write", "read", "name"),
    [
        ("an entry", "table", r"'.*table'"),
        (".data", "scale", r"'.*scale'"),
        ("by numpy", "scale", r"'.*scale'"),
        ("an entry", "cache", ""),
    ],
)
def test_what_another_stage_reads_is_seen_however_it_is_written(write, read, name):
    block, state = common_of(WRITES[write], READS[read])
    state.begin_step()
    assert not state.why_changed()
    block(torch.ones(1))
    says = rf"block 0 \(Writes\), or what runs on its stage, sets {name} in a forward, .* block 1 \(Reads\) reads it"
    assert re.match(says, state.why_changed()) if name else not state.why_changed()


@pytest.mark.parametrize("write", ["a saved array", "a log", "environment"])
@pytest.mark.parametrize("read", ["a loaded tensor", "an open file", "environment"])
def test_files_of_one_stage_are_not_read_by_another(write, read):
    says = (
        r"block 0 \(Writes\) writes files or the environment \(.*\), and block 1 \(Reads\) reads some \(.*\) on another"
    )
    is_refused = (write == "environment") == (read == "environment")
    with pytest.raises(MisfitError, match=says + ".*pass it on in the forward") if is_refused else nullcontext():
        common_of(WRITES[write], READS[read])


def test_logs_and_tables_in_files_may_be_of_all_stages():
    common_of(WRITES["a log"], WRITES["a saved array"])
    common_of(READS["a loaded tensor"], READS["an open file"])
