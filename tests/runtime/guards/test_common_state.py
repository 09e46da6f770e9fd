"""Entries that come to a dictionary, writes past a tensor's version, and files, between blocks of several stages."""

from __future__ import annotations

import os
import re
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


def sets(layer, x):
    layer.place.table["late"] = 1.0


def writes_data(layer, x):
    layer.place.scale.data.mul_(0.5)


def writes_by_numpy(layer, x):
    layer.place.scale.numpy()[0] = 3


def table_of(place):
    if "late" not in place.table:
        place.table["late"] = 1.0
    return place.table


def reads_table(layer, x):
    return x * len(layer.place.table)


def reads_cache(layer, x):
    return x * table_of(layer.place)["late"]


def reads_scale(layer, x):
    return x * layer.place.scale


def saves(layer, x):
    np.save(FILE, x)


def logs(layer, x):
    with open(FILE / str(len(x)), "a") as file:
        file.write("x")


def loads(layer, x):
    return x * torch.load(FILE)


def opens(layer, x):
    with FILE.open() as file:
        return x * float(file.read())


def sets_environment(layer, x):
    os.environ["SCALE"] = str(len(x))


def reads_environment(layer, x):
    return x * float(os.environ["SCALE"])


def common_of(write, read):
    place = SimpleNamespace(table={}, scale=torch.ones(1))
    blocks = [of_kind(Writes, write)(place), of_kind(Reads, read)(place)]
    shared = SharedState(blocks, [range(1), range(1, 2)])
    return blocks[0], shared.common({0: blocks[0]})


@pytest.mark.parametrize(
    ("write", "read", "name"),
    [
        (sets, reads_table, r"'.*table'"),
        (writes_data, reads_scale, r"'.*scale'"),
        (writes_by_numpy, reads_scale, r"'.*scale'"),
        (sets, reads_cache, ""),
    ],
)
def test_what_another_stage_reads_is_seen_however_it_is_written(write, read, name):
    block, state = common_of(write, read)
    state.begin_step()
    assert not state.why_changed()
    block(torch.ones(1))
    says = rf"block 0 \(Writes\), or what runs on its stage, sets {name} in a forward, .* block 1 \(Reads\) reads it"
    assert re.match(says, state.why_changed()) if name else not state.why_changed()


FROM_FILES = [(write, read) for write in (saves, logs) for read in (loads, opens)]


@pytest.mark.parametrize(("write", "read"), [*FROM_FILES, (sets_environment, reads_environment)])
def test_files_of_one_stage_are_not_read_by_another(write, read):
    says = (
        r"block 0 \(Writes\) writes files or the environment \(.*\), and block 1 \(Reads\) reads some \(.*\) on another"
    )
    with pytest.raises(MisfitError, match=says + ".*pass it on in the forward"):
        common_of(write, read)


@pytest.mark.parametrize(
    ("one", "other"), [(logs, saves), (loads, opens), (logs, reads_environment), (sets_environment, loads)]
)
def test_logs_and_tables_in_files_may_be_of_all_stages(one, other):
    common_of(one, other)
