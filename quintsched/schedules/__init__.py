"""Built-in schedules, one file each: short generators of compute order. `kit` holds the tools to write them.

Imports `ir`, and `simulation.costs` for schedules that search. Passes add all other instructions.
"""

from quintsched.schedules.bfs import bfs
from quintsched.schedules.chimera import chimera
from quintsched.schedules.dualpipe import dualpipe
from quintsched.schedules.dualpipe_v import dualpipe_v
from quintsched.schedules.eager_1f1b import eager_1f1b
from quintsched.schedules.gpipe import gpipe
from quintsched.schedules.hanayo import hanayo
from quintsched.schedules.inference import inference
from quintsched.schedules.interleaved import interleaved_1f1b
from quintsched.schedules.interleaved_zb import interleaved_zb
from quintsched.schedules.kit.registry import Order, Schedule, Shape, all_schedules, find_schedule, own_code, schedule
from quintsched.schedules.one_f_one_b import one_f_one_b
from quintsched.schedules.seq_1f1b import seq_1f1b
from quintsched.schedules.v_half import v_half
from quintsched.schedules.v_min import v_min
from quintsched.schedules.zb_auto import zb_auto
from quintsched.schedules.zb_h1 import zb_h1
from quintsched.schedules.zb_h2 import zb_h2
from quintsched.schedules.zbv import zbv

__all__ = [
    "Order",
    "Schedule",
    "Shape",
    "all_schedules",
    "bfs",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "find_schedule",
    "gpipe",
    "hanayo",
    "inference",
    "interleaved_1f1b",
    "interleaved_zb",
    "one_f_one_b",
    "own_code",
    "schedule",
    "seq_1f1b",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
