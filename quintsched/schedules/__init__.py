"""The schedules, each a short generator of compute order in a file of its own."""

from quintsched.schedules.gpipe import gpipe
from quintsched.schedules.inference import inference
from quintsched.schedules.interleaved import interleaved_1f1b
from quintsched.schedules.one_f_one_b import one_f_one_b
from quintsched.schedules.registry import (
    Order,
    Schedule,
    Shape,
    all_schedules,
    find_schedule,
    own_code,
    schedule,
)
from quintsched.schedules.zb_h1 import zb_h1

__all__ = [
    "Order",
    "Schedule",
    "Shape",
    "all_schedules",
    "find_schedule",
    "gpipe",
    "inference",
    "interleaved_1f1b",
    "one_f_one_b",
    "own_code",
    "schedule",
    "zb_h1",
]
