"""A model and data that take no time: what is tested is what happens when something goes wrong.

Whoever cannot reach into a rank's process names the fault in its environment: it is put in as this file is read.
"""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from quintsched.runtime.data import DataSpec, Loaders

WIDTH, CLASSES = 16, 4

if "FAULT" in os.environ:
    from tests.runtime.faults.injection import Injection

    Injection(**json.loads(os.environ["FAULT"])).install(Path(os.environ["FAULT_FOLDER"]))


def build(data: DataSpec, depth: int = 6) -> list[nn.Module]:
    """Return blocks that are all alike, and a head."""
    torch.manual_seed(0)
    return [*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth - 1)), nn.Linear(WIDTH, CLASSES)]


def batches(replica: int, num_replicas: int, count: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return a replica's share of some random batches."""
    generator = torch.Generator().manual_seed(1)
    share = slice(replica, None, num_replicas)
    return [
        (
            torch.randn(batch, WIDTH, generator=generator)[share],
            torch.randint(CLASSES, (batch,), generator=generator)[share],
        )
        for _ in range(count)
    ]


def load(replica: int, num_replicas: int, count: int = 8, batch: int = 16) -> Loaders:
    """Return some random batches."""
    spec = DataSpec(input_shape=(WIDTH,), num_classes=CLASSES)
    made = batches(replica, num_replicas, count, batch)
    return Loaders(made, validation=made[:1], spec=spec)
