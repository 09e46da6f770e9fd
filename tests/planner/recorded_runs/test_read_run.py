"""Recorded runs as they are read: broken traces and missing ranks are refused with the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.errors import InputError, UsageError
from quintsched.recorded_runs import load_run
from tests.helpers.refusals import require_refusals


def primus(folder: Path, steps: list[dict], config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for rank, step in enumerate(steps):
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"1": step}))
    return folder


SPAN = {"ph": "X", "cat": "user_annotation", "ts": 0, "dur": 0, "pid": 1, "tid": 1}
CONFIG = {"pp_size": 1, "vp_size": 1, "num_mbs": 1}
GOOD = {"fwd_start": [0.0], "fwd_end": [1.0], "bwd_start": [1.0], "bwd_end": [2.0]}
BROKEN: list[tuple[dict, dict, str]] = [
    ({"fwd_end": [1.0, 2.0]}, {}, "/fwd_start: not one entry for each"),
    ({"bwd_start": ["x"]}, {}, "/1/bwd_start/0"),
    ({}, {"num_mbs": 0}, "config.json: /num_mbs"),
    ({"bwd_end": [1e300]}, {}, "rank 0 runs Bwd.* to 1e\\+300 ms"),
    ({"bwd_end": [-5.0]}, {}, "an end is not before its start"),
    ({"bwd_start": [0.5]}, {}, "rank 0 runs Bwd.* before Fwd.* has ended"),
]
TORCH = [
    ([], "no trace with spans like PP:0F3"),
    ([{"ph": "X", "name": "PP:0F0", "ts": 0, "dur": 1}], "no trace with spans like PP:0F3"),
    ([SPAN | {"name": f"PP:0{kind}0"} for kind in "FB"], "step 0 has taken no time"),
]


def test_broken_traces_are_refused_with_the_place(tmp_path: Path) -> None:
    none = tmp_path / "none"
    require_refusals(("no such directory", lambda: load_run(none)), ("no traces there", lambda: load_run(tmp_path)))
    for step, config, why in BROKEN:
        with pytest.raises(InputError, match=why):
            load_run(primus(tmp_path, [GOOD | step], CONFIG | config))
    (tmp_path / "torch").mkdir()
    for events, why in TORCH:
        (tmp_path / "torch" / "rank0.json").write_text(json.dumps({"traceEvents": events}))
        with pytest.raises(InputError, match=why):
            load_run(tmp_path / "torch")


def test_the_trace_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    simulated = qs.compile("1f1b", mesh="pp=3", microbatches=4).simulate()
    words = {
        "Fwd": "F",
        "Bwd": "B",
        "SendAct": "SEND_F",
        "RecvAct": "RECV_F",
        "SendGrad": "SEND_B",
        "RecvGrad": "RECV_B",
    }
    texts = [
        json.dumps(
            {
                "distributedInfo": {"rank": rank},
                "traceEvents": [
                    {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": span.start, "dur": 1e-3}
                    | {"name": f"PP:{span.instruction.stage}{words[span.instruction.op]}{span.instruction.microbatch}"}
                    for span in row
                    if span.instruction.op in words
                ],
            }
        )
        for rank, row in enumerate(simulated.timeline)
    ]
    for missing in range(3):
        folder = tmp_path / str(missing)
        folder.mkdir()
        for rank, text in enumerate(texts):
            if rank != missing:
                (folder / f"rank{rank}.json").write_text(text)
        with pytest.raises(InputError, match=f"no trace has computations of stage {missing}: the file of its rank"):
            load_run(folder)
        primus(folder, [{}] * 3, {"pp_size": 3, "num_mbs": 1})
        (folder / "pp_rank_0.json").unlink()
        with pytest.raises(UsageError, match=r"pp_rank_0\.json: cannot read the trace"):
            load_run(folder)
