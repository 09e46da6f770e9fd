"""Where twins of a block are run, whole and cut, and compared on all ranks that run together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from quintsched.errors import MisfitError, StallError

from ...comm import Group, ReduceOp
from ..tensor.apply import apply_tensor_parallel
from ..tensor.choice import Choice
from ..tensor.cuts import Cut
from ..tensor.rules import Rules
from ..tensor.shard import shard_of
from .arrivals import Arrival
from .draws import undisturbed
from .trial import OF_WEIGHT, Difference, Figures, Setting, differences, run_cut, run_whole, shaken
from .twins import Blueprint

TOLERANCE = 1e-4
"""Of the largest number: far more than the order of additions changes in float32, far less than a wrong cut does."""

_NOISE = 10.0
"""Where rounding alone changes numbers by more, a difference may be so many times that."""

_logger = logging.getLogger("quintsched.runtime")


@dataclass
class Kind:
    """Blocks that are proved together, by the first of them."""

    number: int
    blueprint: Blueprint
    cuts: Sequence[Cut]
    choice: Choice = field(default_factory=Choice)
    blocks: list[nn.Module] = field(default_factory=list)
    """Those of this rank, as they are cut."""

    @property
    def name(self) -> str:
        """What messages call the block."""
        return f"block {self.number} ({type(self.blueprint.bare).__name__})"


@dataclass(frozen=True)
class Finding:
    """The worst of what differs between a block cut and whole; `trouble` is an error that cutting or running raised."""

    what: str = ""
    off: float = 0.0
    trouble: str = ""
    weights: frozenset[str] = frozenset()
    """The weights whose gradients differ, if they are all that does and are not cut."""

    def __str__(self) -> str:
        return self.trouble or f"{self.what} is off by {self.off:.1g} of its largest number"


class Bench:
    """Runs blocks over the ranks of tp and of what is sliced.

    Args:
        group: the ranks of tp.
        rules: those of the user.
    """

    def __init__(self, group: Group, rules: Rules) -> None:
        self.group, self._rules = group, rules

    def whole(self, kind: Kind, arrival: Arrival, setting: Setting) -> Figures | None:
        """Run a kind's twin whole; None where it cannot be run, on some rank."""
        figures, problem = None, ""
        try:
            twin = kind.blueprint.draw(self.group.device)
            with undisturbed(self.group.device):
                figures = run_whole(twin, arrival)
        except StallError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if self._most([float(figures is None)], setting)[0]:
            if arrival.inputs is not None:
                why = problem or "another rank raised an error"
                _logger.warning("%s is not proved, for it does not run whole: %s", kind.name, why)
            return None
        return figures

    def changed_buffer(self, kind: Kind, arrival: Arrival) -> str | None:
        """Return the name of a buffer that a forward in training changes, if there is one."""
        try:
            twin = kind.blueprint.draw(self.group.device).train()
            before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
            with undisturbed(self.group.device):
                run_whole(twin, arrival)
        except Exception:  # it is run whole again, and its error is told
            return None
        after = dict(twin.named_buffers())
        return next((n for n, b in before.items() if n in after and not torch.equal(b, after[n])), None)

    def find(self, kind: Kind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice) -> Finding | None:
        """Run a kind's twin cut; return what is off, if anything, on any rank."""
        setting = replace(setting, partial=choice.partial)
        found, trouble = self._differences(kind, arrival, setting, whole, choice)
        failed, most, least = self._most([float(bool(trouble)), float(len(found)), -float(len(found))], setting)
        if failed:
            return Finding(off=float("inf"), trouble=trouble or "another rank raised an error")
        if most != -least:
            return Finding(off=float("inf"), trouble="ranks have other outputs and gradients to compare")
        offs = self._most([difference.off for difference, _ in found], setting)
        worst = max(range(len(offs)), key=offs.__getitem__)
        limit = TOLERANCE
        if TOLERANCE < offs[worst] < 1:
            limit = max(TOLERANCE, _NOISE * self._most([self._noise(kind, arrival, whole)], setting)[0])
        wrong = [number for number, off in enumerate(offs) if off > limit]
        if not wrong:
            return None
        only_weights = all(found[n][0].what == OF_WEIGHT and found[n][1] for n in wrong)
        weights = frozenset(found[n][0].name for n in wrong) if only_weights else frozenset[str]()
        return Finding(str(found[worst][0]), offs[worst], weights=weights)

    def _differences(
        self, kind: Kind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice
    ) -> tuple[list[tuple[Difference, bool]], str]:
        """Return what differs, and whether it is of what is not cut; and the error, in words, if there is one."""
        try:
            block = self._cut(kind, setting, choice)
            with undisturbed(self.group.device):
                cut = run_cut(block, arrival, setting, whole)
            is_whole = {name: shard_of(parameter) is None for name, parameter in block.named_parameters()}
            found = differences(whole, cut, block, arrival, setting)
            return [(difference, is_whole.get(difference.name, False)) for difference in found], ""
        except StallError:
            raise
        except MisfitError as error:
            return [], str(error)
        except Exception as error:
            return [], f"cut, it raises {type(error).__name__}: {error}"

    def _cut(self, kind: Kind, setting: Setting, choice: Choice) -> nn.Module:
        twin = kind.blueprint.draw(self.group.device)
        if setting.tensor is None:
            return twin
        return apply_tensor_parallel(
            twin,
            setting.tensor,
            {**choice.rules, **self._rules},
            path=str(kind.number),
            sequence_parallel=setting.slices_tokens,
            strict=False,
            partial=[name for name, _ in twin.named_parameters()],
            gathers_before=choice.gathers_before,
        )

    def _noise(self, kind: Kind, arrival: Arrival, whole: Figures) -> float:
        """Return how much numbers of a whole block change with its weights and inputs in their last bits."""
        block = kind.blueprint.draw(self.group.device)
        changed = shaken(arrival, block)
        with undisturbed(self.group.device):
            again = run_whole(block, changed)
        return max(difference.off for difference in differences(whole, again, block, arrival, Setting()))

    def _most(self, numbers: Sequence[float], setting: Setting) -> list[float]:
        """Return the largest of each of the numbers of the ranks that run a block together."""
        found = torch.tensor([min(n, 1e30) for n in numbers], dtype=torch.float64, device=self.group.device)
        for group in setting.groups:
            group.all_reduce(found, ReduceOp.MAX).wait()
        return [float(number) for number in found.tolist()]
