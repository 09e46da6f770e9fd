"""Property tests for user-defined schedules; needs hypothesis (`pip install 'quintsched[testing]'`).

    from quintsched.testing import assert_sound

    def test_my_schedule():
        assert_sound(my_schedule, pp=range(1, 7), microbatches=range(1, 13), memory=lambda rank, shape: shape.pp - rank)

`assert_sound` explores shapes and fails with the smallest one that is not sound. To test other properties, `meshes`,
`microbatch_counts`, `placements` and `costs` are hypothesis strategies, and `assert_plan_sound` checks one plan.
Imports `check_many_shapes` and packages below.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    from quintsched.errors import UsageError

    raise UsageError(
        "quintsched.testing needs hypothesis; install it with: pip install 'quintsched[testing]'"
    ) from error

from quintsched.testing.hypothesis_strategies import costs, meshes, microbatch_counts, placements
from quintsched.testing.smallest_failing_shape import Proved, assert_plan_sound, assert_sound

__all__ = ["Proved", "assert_plan_sound", "assert_sound", "costs", "meshes", "microbatch_counts", "placements"]
