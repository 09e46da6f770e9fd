"""Times of operators in a real run, derived from a profile.

A profile that runs each operator separately and repeatedly differs from a run in three ways, all corrected here:

- A GPU with a power limit lowers its clock under matrix products alone. In a run they share the power with memory
  passes, messages and waits, and the clock stays up. The profile itself has the unthrottled rate: a product is not
  slower than a smaller one, so a product's rate is the best among those with no more work.

      measured   77 ● ● 86                     taken   77 ━━━━ 86 ━━━━━━━━━━━━
                        ●  ● 48 ●                      by operations ──▶

- It lacks the product for the weight's gradient (as many operations as the one for the input's gradient), and gradient
  accumulation.
- Sizes that were not measured are scaled from the nearest, in proportion to the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log2

import numpy as np
from numpy.typing import NDArray

from quintsched.errors import MisfitError, counted, suggest
from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.profiles.profile import Operator, Profile

SIZE_TOLERANCE = 1e-9
"""Relative tolerance within which two products count as the same size."""
SAME_SIZE = 0.01
"""Relative tolerance within which a size counts as a measured one."""
RATE_SIZES = ("input", "output", "passed", "whole", "kept", "aside")


@dataclass(frozen=True)
class Timed:
    """Times of one operator in a run, in seconds."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Rates:
    """Lookup of times in a profile."""

    profile: Profile

    def find(self, name: str, tp: int = 1, microbatch: int = 1, cut: int = 0) -> Operator:
        """Return an operator as measured, or the nearest one scaled; raises `MisfitError` for an unknown one."""
        exact = self._by_key.get((name, tp, microbatch, cut))
        return exact or self._scaled(name, tp, microbatch, cut)

    def timed(self, name: str, tp: int, microbatch: int, cut: int) -> Timed:
        """Return an operator's times in a run."""
        found = self.find(name, tp, microbatch, cut)
        forward, backward = found.forward_s, found.backward_s
        if not found.flops:
            return Timed(forward, backward)
        product = self.product_s(found)
        if self.profile.alone and found.kind == "product":
            forward = min(forward, product + self.collective_s("all_reduce", found.tp, found.all_reduce_forward))
            backward = min(backward, product + self.collective_s("all_reduce", found.tp, found.all_reduce_backward))
        if not self.profile.weight_gradients:
            backward += product
        return Timed(forward, backward)

    def product_s(self, operator: Operator) -> float:
        """Return the seconds of an operator's matrix product, by the best rate among products of no more work."""
        sizes, rates = self._best_rates
        place = int(np.searchsorted(sizes, operator.flops * (1 + SIZE_TOLERANCE), side="right")) - 1
        if place < 0:
            return operator.forward_s
        return operator.flops / float(rates[place])

    def pass_s(self, moved: float) -> float:
        """Return the seconds of a memory pass that reads and writes `moved` bytes in all."""
        return moved / self.profile.memory_rate if self.profile.memory_rate else 0.0

    def collective_s(self, kind: str, ranks: int, size: float) -> float:
        """Return the seconds of a collective of `size` bytes per rank, as measured among that many ranks of a node.

        If that number of ranks was not measured, the next larger one is used, or else the largest.
        """
        if ranks < 2 or not size:
            return 0.0
        known = self.profile.collectives.get(kind)
        if not known:
            raise MisfitError(f"the profile has no times of {kind} over {counted(ranks, 'GPU')}")
        return size / rate_at(known[min((n for n in known if n >= ranks), default=max(known))], size, rising=True)

    def message_s(self, size: float, *, network: bool) -> float:
        """Return the seconds of a message of `size` bytes, inside a node or between nodes."""
        curve = (self.profile.network_message if network else None) or self.profile.message
        if not size:
            return 0.0
        if curve is None:
            raise MisfitError("the profile has no times of messages, and the strategy more than one stage")
        return size / rate_at(curve, size)

    def rescaled_s(self, operator: Operator, way: str, work: float, summed: float, tp: int) -> float:
        """Return an operator's time ("forward" or "backward") scaled to other work and other bytes to all-reduce.

        Its collective is scaled by the collective's own curve.
        """
        took: float = getattr(operator, f"{way}_s")
        size: float = getattr(operator, f"all_reduce_{way}")
        before = self.collective_s("all_reduce", operator.tp, size)
        return max(took - before, 0.0) * work + self.collective_s("all_reduce", tp, size * summed)

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, int, int], Operator]:
        return {(o.name, o.tp, o.microbatch, o.cut): o for o in self.profile.operators}

    @cached_property
    def _best_rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ascending operations of products without a collective inside, and the best rate up to each."""
        points = sorted(self._points())
        sizes, rates = (np.array([point[place] for point in points]) for place in (0, 1))
        return sizes, np.maximum.accumulate(rates) if len(rates) else rates

    def _points(self) -> Iterator[tuple[float, float]]:
        halves = 2.0 if self.profile.weight_gradients else 1.0
        for o in self.profile.operators:
            if o.kind != "product" or not o.flops:
                continue
            if not o.sums_forward and o.forward_s:
                yield o.flops, o.flops / o.forward_s
            if not o.sums_backward and o.backward_s:
                yield o.flops, halves * o.flops / o.backward_s

    def _scaled(self, name: str, tp: int, microbatch: int, cut: int) -> Operator:
        """Return the nearest operator with its work scaled in proportion, and its collectives separately."""
        like = [o for o in self.profile.operators if o.name == name]
        if not like:
            raise MisfitError(f"the profile has no {name!r}{suggest(name, {o.name for o in self.profile.operators})}")
        near = min(like, key=lambda o: (_far(o.tp, tp), o.cut != cut, _far(o.microbatch, microbatch)))
        samples, share = microbatch / near.microbatch, near.tp / tp if near.split else 1.0
        found = near.model_dump() | {"tp": tp, "microbatch": microbatch}
        for way in ("forward", "backward"):
            found[f"{way}_s"] = self.rescaled_s(near, way, samples * share, samples, tp)
            found[f"all_reduce_{way}"] *= samples
        found["flops"] *= samples * share
        found["weights"] *= share
        found |= {size: found[size] * samples for size in RATE_SIZES}
        for size in ("output", "kept"):
            found[size] *= share if near.leaves == "cut" else 1.0
        return Operator.model_validate(found)


def rate_at(curve: Curve, size: float, *, rising: bool = False) -> float:
    """Return the measured rate at a size, or else an interpolated one.

    With `rising`, rates between measured sizes never fall: a collective slower than one of a smaller size had an
    obstacle of its own, such as a size that does not divide well. Linear in the logarithm of the size, constant beyond
    both ends.
    """
    sizes, rates = np.array(curve.sizes), np.array(curve.rates)
    nearest = int(np.abs(sizes - size).argmin())
    if abs(sizes[nearest] - size) <= SAME_SIZE * size:
        return float(rates[nearest])
    return float(np.interp(np.log(size), np.log(sizes), np.maximum.accumulate(rates) if rising else rates))


def _far(one: int, other: int) -> float:
    return abs(log2(one / other))
