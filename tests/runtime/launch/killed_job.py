"""A job of two replicas whose second rank is killed once, in step 7, where there is a fuse beside its files."""

JOB = """
model: {{name: "{folder}/model.py:build"}}
data: {{name: "{folder}/data.py:load"}}
parallel: {{mesh: "dp=2"}}
train: {{epochs: 2, batch_size: 16, optimizer: {{name: adam, lr: 3e-3}}}}
runtime: {{timeout_s: 60}}
checkpoint: {{every: 2}}
log: {{every: 1}}
"""

MODEL = """
import os
from pathlib import Path
from torch import nn

FUSE = Path(__file__).with_name("fuse")

class Last(nn.Linear):
    steps = 0
    def forward(self, x):
        self.steps += not x.is_meta and self.training
        if self.steps == 7 and os.environ.get("RANK") == "1" and FUSE.exists():
            FUSE.unlink()
            os.kill(os.getpid(), 9)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: Last(64, 4)]
"""
