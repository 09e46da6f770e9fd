"""Entries that come to a dictionary, writes past a tensor's version, and files, between blocks of several stages."""

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

FILE = Path("statistics")


class Writes(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place


class Reads(Writes):
    pass


def of_kind(base, forward):
    return type(base.__name__, (base,), {"forward": forward})


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
