"""A forward run of a job (`mode: forward`): each sample once through the model, and the outputs in a folder.

weights   the newest whole checkpoint of checkpoint.dir, else model.pretrained, else as blocks are built
samples   of a data set: replica 0 has the first ones, replica 1 those behind them, …; of loaders: each its own
outputs   written by one rank of each replica (`saving.forward_output_files`); the folder is replaced when all are whole
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quintsched.errors import UsageError, counted
from quintsched.files.atomic import whole_path
from quintsched.plan import Plan

from ..agreement.job_fingerprint_between_ranks import agreed_settings
from ..comm import Transport
from ..comm.clocks import now_s
from ..forward_engine import ForwardEngine
from ..models import build_model, tied_weights
from ..saving.atomic_output_folder import replace_folder
from ..saving.checkpoints.bucket_folder import open_place, place_of
from ..saving.checkpoints.save_and_load_checkpoints import SavedCheckpoints
from ..saving.forward_output_files import OUTPUT_FILES, OUTPUTS, OutputFiles, write_index
from ..settings.job_file import JobConfig
from ..splitting.split_whole_model import Split
from ..stage.batches.microbatches import most_rows
from .batch_feed import drained, open_feed
from .costs_for_stage_cuts import block_costs
from .reporter import Reporter, Sinks
from .resume_training import load_pretrained_of, require_settings_of


class StopAskedError(Exception):
    """Ends a run that was asked to stop, on all ranks alike."""


class ForwardRun:
    """Runs a job's model forward over its data.

    Args:
        job: the job file.
        plan: a plan that only runs forward; `job.plan_of` makes it from the job.
        transport: this rank's transport (`connect_for`).
        reporter: where figures go; None: nowhere.
        wants_stop: whether this rank was asked to stop: all then end, and nothing is written.
        overrides: settings of the model that may differ from those of the checkpoint.

    Raises what loading the data, building the model and the engine raise.
    """

    def __init__(
        self,
        job: JobConfig,
        plan: Plan,
        transport: Transport,
        reporter: Reporter | None = None,
        *,
        wants_stop: Callable[[], bool] = lambda: False,
        overrides: tuple[str, ...] = (),
    ) -> None:
        assert job.forward.outputs is not None  # see `plan_of`
        self._outputs, self.job, self._overrides = whole_path(job.forward.outputs), job, overrides
        self._reporter, self._wants_stop = reporter or Reporter(None, lambda _: None), wants_stop
        if transport.rank == 0:
            self._reporter.sinks = Sinks(job.log.sinks)
        self._publisher = transport.publisher
        self._settings = agreed_settings(job, plan, transport)
        self._feed = feed = open_feed(job.data, job.train, plan, transport)
        blocks = build_model(job.model, feed.spec, job.run.seed)
        tied = tied_weights(job.model) or (blocks.tied if isinstance(blocks, Split) else {})
        costs = block_costs(job, plan, blocks, feed, transport)
        settings = {**job.run.of_forward(), "tied": tied}
        self.engine = ForwardEngine(plan, blocks, block_costs=costs, transport=transport, **settings)
        at = plan.mesh.coordinates(transport.rank)
        last = plan.layout.rank_of(plan.routes[0].stages[-1])
        self._writes = plan.mesh.pp_rank(transport.rank) == last and not (at.get("tp", 0) or at.get("cp", 0))

    def write_outputs(self) -> int:
        """Write the outputs of all samples, and return how many these are; 0 where the run was asked to stop."""
        samples, engine = 0, self.engine
        with self._reporter as reporter:
            with self._publisher.phase("load"):
                self._load()
            for line in (engine.tensor_cuts, engine.expert_shares):
                if line is not None:
                    reporter.say(line)
            reporter.write_record({"event": "start", "plan": engine.plan.title, "step": 0})
            began = now_s()

            def write(folder: Path) -> None:
                nonlocal samples
                samples = self._write(folder)

            try:
                replace_folder(self._outputs, OUTPUTS, engine.everyone, OUTPUT_FILES, write)
            except StopAskedError:
                reporter.say("stopped as asked: no outputs are written")
                return 0
            rate = samples / (now_s() - began)
            reporter.write_record({"event": "forward", "samples": samples, "samples_per_s": rate})
            where = f"of {counted(samples, 'sample')} ({self.job.forward.samples})"
            reporter.say(f"outputs {where} written in {self.job.forward.outputs}  {rate:.0f} samples/s")
        return samples

    def _write(self, folder: Path) -> int:
        """Run all batches, and write the outputs into a new folder; return how many samples they are of."""
        engine, everyone, forward = self.engine, self.engine.everyone, self.job.forward
        files = OutputFiles(folder, engine.replica, forward.max_file_mb * 1e6)
        batches = drained(self._publisher.fetching(self._feed.once(forward.samples)), engine)
        for inputs, targets, extras in batches:
            takes = {"targets": targets} if engine.needs_targets else {}
            outputs = engine.run(inputs, **takes, **extras)
            add = partial(files.add_outputs, outputs, most_rows(inputs) or 0)
            everyone.together(add if self._writes and outputs is not None else lambda: None)
            if everyone.add_numbers(self._wants_stop())[0]:
                raise StopAskedError
        with self._publisher.phase("save"):
            mine = everyone.together(lambda: files.finish_files() if self._writes else [])
            told = map(json.loads, everyone.share_bytes(json.dumps([engine.replica, mine]).encode()))
            of_replicas = [said for _, said in sorted(one for one in told if one[1])]
            samples, _ = everyone.together(lambda: write_index(folder, of_replicas) if everyone.is_first else (0, 0))
        return everyone.first_says(samples)

    def _load(self) -> None:
        """Load the weights that the job names (collective)."""
        job, say = self.job, self._reporter.say
        if job.checkpoint.dir is None:
            if job.model.pretrained is None:
                say("the weights are those that blocks are built with: the job has no checkpoint.dir to read")
            load_pretrained_of(job.model, self.engine, say)
            return
        folder = open_place(place_of(job.checkpoint.dir))
        found = SavedCheckpoints(self.engine.saves, folder).newest_whole()
        if found is None:
            raise UsageError(
                f"{job.checkpoint.dir}: there is no checkpoint there; name the folder of a training, or leave "
                "checkpoint.dir out for the weights of model.pretrained"
            )
        of_model = partial(filter, lambda item: item[0].startswith("model."))
        saved, now = dict(of_model(found.manifest.settings.items())), dict(of_model(self._settings.items()))
        require_settings_of(found, saved, now, self._overrides, self.engine.everyone, say)
        found.load_step()
        folder.close()
        say(f"weights of step {found.step} in {job.checkpoint.dir}")
