"""Ranks that share cores: as a simulation in which every rank that computes gets its part of them."""

from dataclasses import dataclass, field

import pytest

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.strategies.descriptions.hardware import Curve, Measured

MODEL = qs.Model(layers=8, hidden=64, heads=4, vocab=64, seq=32, tied=False, dropout=False)
AT_ONCE = Curve(sizes=(1.0, 2.0), rates=(1e18, 1e18))
RATE = Curve(sizes=(1.0, 2.0), rates=(1e9, 1e9))


def hardware(cores: int) -> qs.Hardware:
    """Return ranks that only compute: messages, sums and passes over memory take no time."""
    rates: dict[str, object] = {name: {"fp32": RATE} for name in ("matmul", "attention", "attention_backward")}
    rates |= dict.fromkeys(("memory", "optimizer", "link", "link_work"), AT_ONCE)
    rates |= dict.fromkeys(("all_reduce", "all_reduce_work"), dict.fromkeys((2, 4, 8), AT_ONCE))
    measured = Measured(**rates, kernel_s=0.0, cores=cores, sharing={1: 1.0, 8: 1.0})
    sizes = {"tflops": {"fp32": 0.001}, "memory_gb": 4.0, "memory_gbps": 10.0, "link_gbps": 1.0, "network_gbps": 1.0}
    return qs.Hardware(name="cpu", reserved_gb=0, measured=measured, **sizes)


def strategy(**given: int) -> qs.Strategy:
    ranks = given.get("dp", 1) * given.get("pp", 1) * given.get("tp", 1)
    return qs.Strategy(gpus=ranks, batch=64, seq=MODEL.seq, dtype="fp32", **given)


@dataclass
class Shared:
    """1F1B pipelines whose ranks share cores, all that compute getting equal parts, one core at most."""

    pp: int
    microbatches: int
    replicas: int
    cores: int
    forward: float = 1.0
    backward: float = 2.0
    done: set[tuple[int, type, int, int]] = field(default_factory=set)

    def makespan(self) -> float:
        plan = qs.compile("1f1b", mesh={"pp": self.pp}, microbatches=self.microbatches)
        computes = [[i for i in program if isinstance(i, Fwd | Bwd)] for program in plan.programs]
        left = {(replica, rank): [*computes[rank]] for replica in range(self.replicas) for rank in range(self.pp)}
        work = dict.fromkeys(left, 0.0)
        now = 0.0
        while any(left.values()):
            active = [place for place in left if left[place] and self._is_ready(*place, left[place][0])]
            for place in active:
                work[place] = work[place] or (self.forward if isinstance(left[place][0], Fwd) else self.backward)
            rate = min(1.0, self.cores / len(active))
            passed = min(work[place] for place in active) / rate
            now += passed
            for place in active:
                work[place] -= passed * rate
                if work[place] < 1e-9:
                    work[place] = 0.0
                    instruction = left[place].pop(0)
                    self.done.add((place[0], type(instruction), instruction.stage, instruction.microbatch))
        return now

    def _is_ready(self, replica: int, rank: int, instruction: Fwd | Bwd) -> bool:
        before = rank - 1 if isinstance(instruction, Fwd) else rank + 1
        known = (replica, type(instruction), before, instruction.microbatch)
        return not 0 <= before < self.pp or known in self.done


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize(("dp", "pp", "microbatch"), [(1, 2, 8), (1, 4, 8), (2, 2, 4), (1, 8, 4), (2, 4, 4), (4, 2, 2)])
def test_pipelines_take_as_long_as_simulated(dp: int, pp: int, microbatch: int, cores: int) -> None:
    """Layers alone are compared: one without an embedding and a head is the same on all ranks."""
    microbatches = 64 // (dp * microbatch)
    own = qs.predict(MODEL, hardware(cores), strategy(dp=dp, pp=pp, microbatch=microbatch)).step_s
    alone = qs.predict(MODEL, hardware(1), strategy(microbatch=64)).step_s  # all work, on one core
    unit = alone / (3 * microbatches * pp * dp)
    simulated = Shared(pp, microbatches, dp, cores).makespan() * unit
    assert own == pytest.approx(simulated, rel=0.05)
