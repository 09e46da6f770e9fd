"""A model, loaders and an optimizer of your own, trained by `Trainer`: validation, log, checkpoints, early stopping.

python examples/trainer.py                                  one process
torchrun --nproc-per-node 4 examples/trainer.py dp=2,pp=2   four
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quintsched.runtime import Trainer


class Net(nn.Module):
    """A classifier of 8 x 8 images: (samples, 64) to (samples, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self.layers(images)  # type: ignore[no-any-return]


def main() -> None:
    """Train on 1,500 images, and validate on the others."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    inputs, targets = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset(inputs.float() / 16, targets)
    train, validation = (TensorDataset(*data[part]) for part in (slice(1500), slice(1500, None)))
    Trainer(
        Net(),
        train,
        validation,
        {
            "parallel": {"mesh": sys.argv[1] if len(sys.argv) > 1 else "dp=1", "microbatches": 2},
            "train": {"epochs": 3, "batch_size": 60, "patience": 2},
            "log": {"every": 25},
        },
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    ).fit()


if __name__ == "__main__":
    main()
