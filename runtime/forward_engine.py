"""The engine of inference plans: forwards alone, with the weights alone.

engine = ForwardEngine(qs.compile("inference", mesh="pp=4", microbatches=8), blocks)
engine.load_pretrained("weights")
outputs = engine.run(inputs)                 # on ranks of the last stage; None elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from torch import nn

from quintsched.check_call_arguments import PLAN, ROW, called_as, ours, takes
from quintsched.errors import UsageError
from quintsched.plan import Plan

from .blocks.block_builders import TARGETS, Blocks
from .comm import Transport
from .engine_base import EngineBase
from .interpreter.instruction_state import RunOptions
from .optim.loss_scale import LossScale
from .plan_requirements import require_blocks, require_mode
from .settings.engine_settings import RunSettings, taking_settings


@partial(taking_settings, trains=False)
class ForwardEngine(EngineBase):
    """Runs an inference plan on a user's own blocks: no loss, no gradients, no optimizer.

    From run to run, a rank holds the weights of its stages, or its shards of them where the plan has ZeRO-3, and
    buffers for the messages that it receives. Weights come by `set_weights`, `load_pretrained`, `load_state_files`,
    `load_full_state_dict`, `load_state_dict` or `load_dcp`, also of checkpoints of a training on any mesh, whose
    optimizer state is passed over; before, they are those that blocks are built with. Numbers are those of the whole
    model in one process, in evaluation mode.

    Args:
        plan: a plan that only runs forward (schedule "inference"); it must be sound under the transport's profile.
        blocks: the model in order, as for `Engine`.
        block_costs: what each block costs, by which stages are cut; None estimates it.
        transport: None takes NCCL or gloo under torchrun, and this process alone for a mesh of one rank.
        settings: by name, as `RunSettings` declares them:
            {settings}

    Raises:
        UsageError: a plan that trains, or a setting of training.
        UnsoundError: the plan is not proved for the transport.
        MisfitError: world size, shapes or sizes do not fit the plan, or ranks disagree.
        StallError: a peer died or does not answer.
    """

    @takes("ForwardEngine(plan, blocks)", plan=PLAN, block_costs=ROW, transport=ours("Transport"))
    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        *,
        block_costs: Sequence[float] | None = None,
        transport: Transport | None = None,
        **settings: Any,
    ) -> None:
        require_mode(plan, "forward", "ForwardEngine")
        read = RunSettings.of_arguments(settings, "ForwardEngine", trains=False)
        max_sends = self._begin(plan, blocks, read, block_costs, transport)
        require_blocks(blocks)
        self._prepare, self._scale = None, LossScale(None)
        self._agree_on_settings(blocks, {})
        self._connect_ranks()
        self._build(blocks, lambda named: [], block_costs, cut_logits=False)
        options = RunOptions(
            loss_fn=_no_loss,
            metrics={},
            settings=self.settings.model_copy(update={"loss_over": "microbatch"}),  # which is not examined
            scale=self._scale,
            max_sends=max_sends,
            wants_stop=lambda: False,
            shows_modules=any(isinstance(block, nn.Module) for block in blocks),
            finds_loss=False,
        )
        self._bind(blocks, options)

    @called_as("engine.run(inputs)")
    def run(self, inputs: Any, *, microbatches: int | None = None, **extras: Any) -> Any:
        """Run one batch forward, with the blocks in evaluation mode, and return what the last block gives (collective).

        That is one tree of this replica's samples, in their order, whole over tp and cp, on ranks of the last stage;
        None on other ranks, and where the replica has no samples. Tensors are joined along samples; those of no
        dimensions are stacked, one for each microbatch.

        Args:
            inputs: this replica's samples (samples, …), sequences whole; None will do unless `needs_inputs`. Lengths
                and numbers of samples may differ from run to run and from replica to replica, and may be 0, but not in
                a replica's first run.
            microbatches: how many there are in this run, on all ranks; None: as the plan says.
            extras: what blocks take by name (positions, masks, …), (samples, …) on every rank; `targets` too, where
                blocks take these.

        Raises `MisfitError` for a batch that cannot be cut, a replica whose ranks get others, or outputs that cannot be
        joined.
        """
        targets = extras.pop(TARGETS, None)
        return self._run_forward(inputs, targets, extras, microbatches, wants_outputs=True).outputs


def _no_loss(output: Any, targets: Any) -> NoReturn:
    raise UsageError("a forward run finds no loss")
