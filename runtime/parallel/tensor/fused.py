"""The fused blocks of a layer's outputs: each rank has its shard of every one.

parts 3          [ q0 q1 | k0 k1 | v0 v1 ]          rank 0: q0 k0 v0
parts (2, 1, 1)  [ q0 q0 q1 q1 | k0 k1 | v0 v1 ]    rank 0: q0 q0 k0 v0
parts 1          [ q0 k0 v0 | q1 k1 v1 ]            rank 0: q0 k0 v0         heads side by side
"""

from __future__ import annotations

from quintsched.errors import MisfitError

from ...settings.tensor_rules import Parts


def block_sizes(total: int, parts: Parts) -> list[int]:
    """Return the sizes of the fused blocks that `total` consists of; `parts` divide it."""
    proportions = (1,) * parts if isinstance(parts, int) else parts
    unit = total // sum(proportions)
    return [unit * proportion for proportion in proportions]


def require_even(total: int, size: int, what: str, parts: Parts = 1) -> None:
    """Check that each of the fused blocks of `total` can be cut into `size`.

    Raises:
        MisfitError: it cannot; says which sizes can.
    """
    if not divides(total, size, parts):
        choices = ", ".join(str(n) for n in range(1, min(total, 1024) + 1) if divides(total, n, parts))
        blocks = "" if parts == 1 else f" (in {parts} fused blocks)" if isinstance(parts, int) else f" (parts {parts})"
        raise MisfitError(f"tp={size} does not divide the {total} {what}{blocks}; choose tp from {choices or 'none'}")


def divides(total: int, size: int, parts: Parts) -> bool:
    """Whether each of the fused blocks of `total` can be cut into `size`."""
    if isinstance(parts, int):
        return total % (parts * size) == 0
    return total % sum(parts) == 0 and all(block % size == 0 for block in block_sizes(total, parts))
