"""Constraints on shapes: each returns the fault of a shape with the nearest sizes that work, or None.

The docstring of each is its text in the list of `quintsched schedules`.
"""

from __future__ import annotations

from quintsched.schedules.kit.registry import Shape

MOST_SLOT_RANKS = 1024
"""Maximum number of ranks for orders that are computed slot by slot: a thousand ranks take half a minute."""


def whole_rounds(shape: Shape) -> str | None:
    """M a multiple of P"""
    below = shape.microbatches // shape.pp * shape.pp
    if below == shape.microbatches:
        return None
    nearest = f"{below} or {below + shape.pp}" if below else f"{shape.pp}"
    return f"microbatches is {shape.microbatches}, no multiple of pp={shape.pp}; the nearest that works: {nearest}"


def rounds_both_ways(shape: Shape) -> str | None:
    """P even, M a multiple of P"""
    if shape.pp % 2:
        nearest = f"{shape.pp - 1} or {shape.pp + 1}" if shape.pp > 1 else "2"
        return f"pp is {shape.pp}, which is odd; the nearest that works: {nearest}"
    return whole_rounds(shape)


def whole_waves(shape: Shape) -> str | None:
    """v even, M a multiple of P"""
    if shape.chunks % 2:
        nearest = f"{shape.chunks - 1} or {shape.chunks + 1}"
        return f"chunks is {shape.chunks}, which is odd; the nearest that works: {nearest}"
    return whole_rounds(shape)


def meets_half_way(shape: Shape) -> str | None:
    """P even, M even and at least 2P"""
    pp, microbatches = shape.pp, shape.microbatches
    if pp % 2:
        nearest = f"{pp - 1} or {pp + 1}" if pp > 1 else "2"
        return f"pp is {pp}, which is odd; the nearest that works: {nearest}"
    if microbatches < 2 * pp:
        return f"microbatches is {microbatches}, below 2 x pp = {2 * pp}; the nearest that works: {2 * pp}"
    if microbatches % 2:
        return (
            f"microbatches is {microbatches}, which is odd; "
            f"the nearest that works: {microbatches - 1} or {microbatches + 1}"
        )
    return None


def slot_by_slot(shape: Shape) -> str | None:
    """P at most 1024"""
    if shape.pp <= MOST_SLOT_RANKS:
        return None
    return f"pp is {shape.pp}, but its order is worked out slot by slot; the most that works: {MOST_SLOT_RANKS}"
