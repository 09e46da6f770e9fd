"""Judge of skips: senders and receivers of each, derived independently from the head of a plan.

Tokens are ("skip", name, stage that takes it, unit), and ("skip grad", name, stage, unit) for the sum over that stage
and all that take the skip after it.
"""

from itertools import pairwise

from quintsched.ir.instruction_set import Message, RecvSkip, RecvSkipGrad, SendSkip, SendSkipGrad
from quintsched.plan import Plan

Token = tuple[object, ...]


def skip_head_faults(plan: Plan) -> list[str]:
    """Say which skips go where they cannot."""
    if not plan.skips:
        return []
    if len(plan.routes) != 1:
        return ["skips know no route"]
    place = {stage: at for at, stage in enumerate(plan.routes[0].stages)}
    found = []
    for name, stages in plan.skips.items():
        if len(stages) < 2 or not all(stage in place for stage in stages):
            found.append(f"{name} goes nowhere")
        elif any(place[a] >= place[b] for a, b in pairwise(stages)):
            found.append(f"{name} goes back")
        if any(blocks == 0 for stage, blocks in enumerate(plan.blocks_per_stage) if stage in stages):
            found.append(f"{name} is where nothing is computed")
    return found


class SkipJudge:
    """Tokens of skips that stages take and give, and that messages carry."""

    def __init__(self, plan: Plan) -> None:
        self._home, self._skips = plan.stage_to_pp, plan.skips

    def _giver(self, name: str, taker: int) -> int:
        """The last stage before the taker that has the skip on its rank; the one that makes it, if none has."""
        source, *takers = self._skips[name]
        before = [source, *takers[: takers.index(taker)]]
        return next((stage for stage in reversed(before) if self._home[stage] == self._home[taker]), source)

    def forward(self, stage: int, unit: int) -> tuple[list[Token], list[Token]]:
        """Return the tokens that a forward takes, and those that it gives."""
        takes = [("skip", name, stage, unit) for name, (_, *takers) in self._skips.items() if stage in takers]
        gives = [
            ("skip", name, taker, unit)
            for name, (_, *takers) in self._skips.items()
            for taker in takers
            if self._giver(name, taker) == stage and taker != stage
        ]
        return takes, gives

    def backward(self, stage: int, unit: int) -> tuple[list[Token], list[Token]]:
        """Return the tokens that a backward takes, and those that it gives."""
        holding = [(name, stages) for name, stages in self._skips.items() if stage in stages]
        takes = [
            ("skip grad", name, stages[stages.index(stage) + 1], unit)
            for name, stages in holding
            if stage != stages[-1]
        ]
        return takes, [("skip grad", name, stage, unit) for name, stages in holding if stage != stages[0]]

    def carried(self, i: Message) -> Token | None:
        """Return the token of a message of a skip."""
        if i.skip not in self._skips or i.stage not in self._skips[i.skip]:
            return None
        stages = self._skips[i.skip]
        at = stages.index(i.stage)
        match i:
            case SendSkip():
                firsts = [t for t in stages[1:] if self._home[t] == i.peer != self._home[i.stage]]
                return ("skip", i.skip, firsts[0], i.microbatch) if firsts and at == 0 else None
            case RecvSkip():
                away = at > 0 and self._home[self._giver(i.skip, i.stage)] != self._home[i.stage]
                return ("skip", i.skip, i.stage, i.microbatch) if away else None
            case SendSkipGrad():
                away = at > 0 and self._home[stages[at - 1]] != self._home[i.stage]
                return ("skip grad", i.skip, i.stage, i.microbatch) if away else None
            case RecvSkipGrad():
                away = at + 1 < len(stages) and self._home[stages[at + 1]] != self._home[i.stage]
                return ("skip grad", i.skip, stages[at + 1], i.microbatch) if away else None
        raise AssertionError(f"what is {i}?")
