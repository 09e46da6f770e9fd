"""A model whose ranks are killed, each once, where a file `fuse-RANK` lies beside it; they tell that they train."""

MODEL = """
import os, time
from pathlib import Path
from torch import nn

class Last(nn.Linear):
    forwards = 0
    def forward(self, x):
        self.forwards += not x.is_meta and self.training
        rank, here = os.environ.get("RANK"), Path(__file__)
        if self.forwards == 3:
            here.with_name(f"rank-{rank}").write_text(str(os.getpid()))
        if self.forwards == KILLED_AT.get(rank) and here.with_name(f"fuse-{rank}").exists():
            here.with_name(f"fuse-{rank}").unlink()
            os.kill(os.getpid(), 9)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: nn.Linear(64, 64), lambda: Last(64, 4)]
"""


def losing(killed_at: dict[str, int]) -> str:
    """Return the source of the model; `killed_at`: by rank, its forward of training, from 1 on."""
    return f"KILLED_AT = {killed_at}\n{MODEL}"
