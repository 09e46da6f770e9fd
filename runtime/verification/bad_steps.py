"""Steps whose gradients are not finite: one is skipped; after some in a row the run stops and says where that arose.

    step 7 skipped, step 8 skipped, … ──▶ the last one runs again, with checks on (`not_finite`) ──▶ the first finding
                                          its batch is written down: safetensors                     of all ranks

The weights are still those that the step began with, since it was skipped, and so are its masks. A step is known by the
skipped one that counts; where a loss scale above 1 may be what made gradients overflow, it does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from quintsched.errors import NotFiniteError, QuintschedError
from quintsched.files.atomic import whole_path, write_whole

from ..blocks.trees import tensors_of
from ..comm import Group
from ..comm.control import share_bytes
from ..interpreter.interpreter import PreparedStep
from ..interpreter.plan_runner import PlanRunner
from ..interpreter.tally import StepResult
from ..saving.rank_tensors import HeldTensor
from ..stage.batches.microbatches import Batch
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from .not_finite import LOSS, UNKNOWN, FiniteChecks, NotFinite
from .recording import ALL

MOST_FINDINGS = 3
"""So many findings of each rank are compared: they are sorted."""


class BadSteps:
    """Counts the steps in a row that were skipped, and stops the run; the same on all ranks.

    Args:
        runner: runs steps.
        model: this rank's stages.
        state: their weights, and what their optimizers work on.
        held: returns what it holds of the model.
        world: all ranks.
        most: how many are too many; 0: any number is allowed.
        directory: where the batch of the last one is written; None: nowhere.
    """

    def __init__(
        self,
        runner: PlanRunner,
        model: RankModel,
        state: TrainingState,
        held: Callable[[], list[HeldTensor]],
        world: Group,
        most: int,
        directory: str | Path | None,
    ) -> None:
        self._runner, self._model, self._state, self._held = runner, model, state, held
        self._world, self._most = world, most
        self._directory = None if directory is None else whole_path(directory)
        self._parts: list[PreparedStep] = []
        self._in_row = 0

    def note(self, step: PreparedStep, result: StepResult, *, last: bool) -> None:
        """Take note of a step, or of a part of one whose gradients are accumulated (collective).

        Raises `NotFiniteError` where it is one too many of those that were skipped.
        """
        if not self._most:
            return
        self._parts.append(step)
        if not last:
            return
        parts, self._parts = self._parts, []
        if result.empty or (result.skipped and step.interpreter.state.step_end.scale.may_overflow):
            return
        self._in_row = self._in_row + 1 if result.skipped else 0
        if self._in_row >= self._most:
            self._stop(parts, float(result.weight))

    def _stop(self, parts: list[PreparedStep], weight: float) -> None:
        found = self._first([finding for part in self._look_again(parts) for finding in part.found])
        number, unit_count = self._runner.steps.total, parts[-1].interpreter.state.flows.plan.schedule.num_units
        paths = self._write(parts, number, found, unit_count)
        times = "a step" if self._most == 1 else f"{self._most} steps in a row"
        where = self._where(found, parts[-1], weight)
        raise NotFiniteError(
            f"the gradients of {times} were not finite, so that nothing is learnt; the last is step {number}. {where}. "
            f"{paths}. Allow more of them, or any number, by train.max_skipped (Engine: max_skipped); 0 is any number"
        )

    def _look_again(self, parts: list[PreparedStep]) -> list[FiniteChecks]:
        """Run the step again, and return what was looked at in each of its parts."""
        runner, model = self._runner, self._model
        runner.steps.in_run -= 1
        looked = []
        for part in parts:
            state = part.interpreter.state
            plan, tally = state.flows.plan, state.compute.tally
            checks = FiniteChecks(plan, model, self._state.masters, self._held, tally=tally)
            if part is parts[0]:
                checks.look_at_weights()
            checks.look_at_batch(part.batch)
            with checks.watching():
                calls = part.interpreter.watched(checks)
                runner.run(part, calls, last=part is parts[-1])
            looked.append(checks)
        return looked

    def _first(self, mine: list[NotFinite]) -> NotFinite | None:
        """Return the first finding of all ranks; None where nobody found anything."""
        data = [asdict(finding) for finding in sorted(mine, key=lambda finding: finding.order)[:MOST_FINDINGS]]
        found = [
            NotFinite(**{**finding, "rank": rank})
            for rank, said in enumerate(share_bytes(self._world, json.dumps(data).encode()))
            for finding in json.loads(said)
        ]
        return min(found, key=lambda finding: finding.order, default=None)

    def _where(self, found: NotFinite | None, step: PreparedStep, weight: float) -> str:
        """Say in words where the first finding is."""
        if not weight and (found is None or found.unit == UNKNOWN):
            return "No target counts for the loss: its total weight is 0, by which gradients are divided"
        if found is None:
            return "Run again, all that was looked at is finite: what it computes is not the same in every run"
        plan, slices = self._model.plan, step.interpreter.state.flows.plan.schedule.slices
        place = ", ".join(f"{axis}={at}" for axis, at in plan.mesh.coordinates(found.rank).items())
        words = [f"rank {found.rank} ({place})"]
        if found.block in (LOSS, ALL):
            words += ["the loss function"] * (found.block == LOSS)
        else:
            stage = next((s for s, blocks in enumerate(self._model.cuts) if found.block in blocks), None)
            name = type(self._model.outlines[found.block]).__name__
            words += [f"stage {stage}", f"block {found.block} ({name})"]
        if found.unit not in (ALL, UNKNOWN):
            replica, unit = divmod(found.unit, step.interpreter.state.flows.plan.schedule.num_units)
            words += [f"microbatch {unit // slices}"]
            words += [f"slice {unit % slices}"] * (slices > 1) + [f"replica {replica}"] * (self._model.num_replicas > 1)
        first = f"Run again, the first numbers that are not finite are in the {found.kind}"
        return f"{first}: {', '.join(words)}: {found.what}"

    def _write(self, parts: list[PreparedStep], step: int, found: NotFinite | None, num_units: int) -> str:
        """Write down the batch of the replica in which it arose, and say where (collective)."""
        said = ""
        coordinates = self._model.plan.mesh.coordinates(self._world.ranks[self._world.index])
        replica = 0 if found is None or not 0 <= found.unit < UNKNOWN else found.unit // num_units
        is_mine = replica == self._model.replica and not coordinates.get("tp", 0)
        given = _tensors([part.batch for part in parts])
        if self._directory is not None and is_mine and given:
            path = self._directory / f"not-finite-step-{step:08d}-rank-{self._world.index:05d}.safetensors"
            said = _written(path, given)
        all_said = [text.decode() for text in share_bytes(self._world, said.encode())]
        if self._directory is None:
            return "Its batch is not written down, as there is no directory for it (log.path, or Engine: spike_dir)"
        return f"Its batch is in {', '.join(filter(None, all_said))}"


def _tensors(batches: list[Batch]) -> dict[str, Tensor]:
    """Return what a rank was given, by unit and place: "inputs.2.0" is the first tensor of unit 2."""
    found: dict[str, Tensor] = {}
    for part, batch in enumerate(batches):
        before = f"part{part}." if len(batches) > 1 else ""
        for name, units in (("inputs", batch.inputs), ("targets", batch.targets), ("extras", batch.extras)):
            for unit, given in enumerate(units):
                for place, tensor in enumerate(tensors_of(given)):
                    found[f"{before}{name}.{unit}.{place}"] = tensor.detach().cpu().clone().contiguous()
    return found


def _written(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to a file, and return its path; or why that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(tensors), "the batch")
    except (OSError, ValueError, QuintschedError) as error:
        return f"no file, as {path} cannot be written ({error})"
    return str(path)
