"""Requests of small plans whose files have, between them, every field and every odd name."""

ODD_NAME = 'quo"te \\back/slash é€😀 ],[ %d "op": {'

REQUESTS = (
    {"schedule": "1f1b", "mesh": "pp=2", "microbatches": 2},
    {"schedule": "1f1b", "mesh": "pp=2", "microbatches": 2, "tied": {ODD_NAME: (0, 1), "a, b": (0, 1)}},
    {"schedule": "gpipe", "mesh": "dp=2,pp=2,cp=2,ep=2", "microbatches": 2, "buckets_per_stage": 2},
    {"schedule": "zb-h1", "mesh": "dp=2,pp=2,ep=2,tp=2", "microbatches": 3, "zero": 2, "zero_every": 2},
    {"schedule": "1f1b", "mesh": "dp=2,pp=2", "microbatches": 2, "zero": 3, "recompute": 1},
    {"schedule": "1f1b", "mesh": "dp=3,pp=1", "microbatches": 1, "communication": "auto", "zero": 1},
    {"schedule": "dualpipe-v", "mesh": "dp=2,pp=2", "microbatches": 4, "communication": "ring"},
    {"schedule": "dualpipe", "mesh": "pp=2", "microbatches": 4},
    {"schedule": "inference", "mesh": "pp=3", "microbatches": 1},
    {"schedule": "dualpipe-v", "mesh": "dp=2,pp=2", "microbatches": 4, "overlap": True, "zero": 3},
    {"schedule": "interleaved-1f1b", "mesh": "pp=2", "microbatches": 4, "overlap": True},
)
