"""Trace events, read by the rules of Perfetto's importer: nothing is dropped, and every flow has two ends."""

import gzip
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import quintsched as qs
from quintsched.ir.instruction_set import Recv, Send, short
from quintsched.trace.measured_trace import MeasuredStep
from quintsched.trace.read_chrome_trace import read_profile
from quintsched.viz import save_events
from tests.traces import COSTS, measured, write_trace

Slice = dict[str, Any]


class Imported:
    """Content of a file as Perfetto shows it: slices by thread, flows from slice to slice, counters by name."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.data = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.processes: dict[int, str] = {}
        self.threads: dict[int, tuple[int, str]] = {}
        self.slices: dict[tuple[str, str], list[Slice]] = defaultdict(list)
        self.flows: list[tuple[Slice, Slice]] = []
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        events = self.data["traceEvents"]
        for event in (one for one in events if one["ph"] == "M"):
            self._name(event)
        stacks: dict[int, list[Slice]] = defaultdict(list)
        begun: dict[tuple[str, str, int], Slice] = {}
        for event in sorted((one for one in events if one["ph"] != "M"), key=lambda one: self.ns(one["ts"])):
            assert event["pid"] in self.processes
            if event["ph"] == "C":
                assert all(isinstance(value, float | int) for value in event["args"].values())
                name = f"{event['pid']} {event['name']} {next(iter(event['args']))}"
                self.counters[name].append((self.ns(event["ts"]), next(iter(event["args"].values()))))
                continue
            now, stack = self.ns(event["ts"]), stacks[event["tid"]]
            assert self.threads[event["tid"]][0] == event["pid"]
            while stack and stack[-1]["until"] <= now:
                stack.pop()
            key = (event.get("cat", ""), event["name"], event.get("id", 0))
            if event["ph"] == "X":
                until = now + self.ns(event["dur"])
                assert now >= 0
                assert not stack or until <= stack[-1]["until"], "dropped: it overlaps without nesting"
                stack.append({**event, "until": until})
                self.slices[self.processes[event["pid"]], self.threads[event["tid"]][1]].append(stack[-1])
            elif event["ph"] == "s":
                assert stack, "a flow begins outside of any slice"
                begun[key] = stack[-1]
            elif event["ph"] == "f":
                assert event["bp"] == "e"
                assert stack, "a flow ends outside of any slice"
                self.flows.append((begun[key], stack[-1]))
            else:
                raise AssertionError(event["ph"])

    def _name(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            assert event["pid"] > 0
            assert event["pid"] not in self.processes
            self.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert event["tid"] not in self.threads, "two threads of one number lose a name"
            self.threads[event["tid"]] = (event["pid"], event["args"]["name"])

    @staticmethod
    def ns(time_us: float) -> int:
        assert round(time_us, 3) == time_us, "the importer rounds to nanoseconds: slices that touch could overlap"
        return round(time_us * 1000)


@pytest.mark.parametrize(
    ("name", "mesh", "how"),
    [("1f1b", "pp=3", {}), ("zb-h1", "dp=2,pp=2", {"zero": 1}), ("dualpipe-v", "pp=2", {"overlap": True})],
)
def test_nothing_is_dropped_and_every_message_is_a_flow(tmp_path: Path, name: str, mesh: str, how: Any) -> None:
    simulation, step = measured(tmp_path, name, mesh, jitter=0.1, **how)
    save_events(simulation, [step], tmp_path / "events.json.gz")
    found = Imported(tmp_path / "events.json.gz")
    assert [*found.processes.values()] == ["planned", "measured, step 2"]
    sent = [i for program in step.plan.programs for i in program if isinstance(i, Send)]
    assert len(found.flows) == 2 * len(sent)
    assert {target["cat"] for _, target in found.flows} <= {"Fwd", "Bwd", "BwdInput", "Overlap"}
    for process, run in (("planned", simulation), ("measured, step 2", step)):
        shown = [one for (of, _), slices in found.slices.items() if of == process for one in slices]
        owed = [i for program in step.plan.programs for i in program if not isinstance(i, Recv)]
        assert sum(one["cat"] != "wait" for one in shown) == len(owed)
        assert max(one["until"] for one in shown) == pytest.approx(run.makespan * 1e6, abs=2)
        several = len(step.plan.stage_to_pp) > step.plan.mesh.pp
        kinds, rows = ("Fwd", "Overlap"), found.slices[process, "rank 0"]
        pairs = [short(i, with_stage=several) for i in step.plan.programs[0] if i.op in kinds]
        assert [one["name"] for one in rows if any(kind in one["cat"] for kind in kinds)] == pairs
    for rank, peak in enumerate(simulation.peak_activations):
        values = found.counters[f"1 activations of rank {rank} microbatches"]
        assert max(amount for _, amount in values) == pytest.approx(peak)
        assert values[-1][1] == pytest.approx(0)
    for pid, run in zip(found.processes, ("planned", "measured"), strict=True):
        wire = found.counters[f"{pid} messages on the wire size"]
        assert max(size for _, size in wire) >= 1, run
        assert wire[-1][1] == 0


def test_a_profile_of_torch_is_on_the_same_clock(tmp_path: Path) -> None:
    simulation = qs.compile("1f1b", mesh="pp=2", microbatches=2).simulate(COSTS)
    step = write_trace(tmp_path, simulation).step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        before = time.time()
        torch.ones(64, 64) @ torch.ones(64, 64)
        after = time.time()
    profiled.export_chrome_trace(str(tmp_path / "rank1.json.gz"))
    trace = read_profile(tmp_path / "rank1.json.gz")
    assert trace is not None
    moved = MeasuredStep(step.plan, step.number, step.unit, step.timeline, before - 1.0)
    save_events(simulation, [moved], tmp_path / "all.json", {"rank 1": trace})
    found = Imported(tmp_path / "all.json")
    of_rank = [row for (of, _), rows in found.slices.items() if "rank 1" in of for row in rows]
    (product,) = [row for row in of_rank if row["name"] == "aten::mm"]
    assert 1.0 - 0.001 <= product["ts"] / 1e6 <= 1.0 + after - before + 0.001
    with pytest.raises(qs.UsageError, match="none is given"):
        save_events(simulation, (), tmp_path / "all.json", {"rank 1": trace})


def test_slices_of_a_profile_that_overlap_are_kept_on_another_thread(tmp_path: Path) -> None:
    """As kernels of one stream in files of CUPTI and of rocprof; a profiler may begin before the step, too."""
    simulation = qs.compile("1f1b", mesh="pp=2", microbatches=2).simulate(COSTS)
    step = write_trace(tmp_path, simulation).step()
    kernels = [{"ph": "X", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": 3.7} for name, ts in (("a", 3), ("b", 5))]
    flow = {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 5, "pid": 0, "tid": 7, "ts": 3}
    named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    trace = {"baseTimeNanoseconds": int(step.began_s * 1e9) - 10**9, "traceEvents": [named, *kernels, flow]}
    save_events(simulation, [step], tmp_path / "all.json", {"rank 0": trace})
    found = Imported(tmp_path / "all.json")
    kept = {name: rows for (of, name), rows in found.slices.items() if of.startswith("rank 0")}
    named = {name: [one["name"] for one in rows] for name, rows in kept.items()}
    assert named == {"stream 7": ["a"], "stream 7 (2)": ["b"]}
    assert found.slices["planned", "rank 0"][0]["ts"] == pytest.approx(1e6, abs=10)
