"""Blocks that return losses: sums, means, and others that are neither."""

from torch import nn

from quintsched.runtime.losses.loss_reductions import Over

WIDTH, SAMPLES = 4, 13


class Block(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        self.loss, self.step = loss, 0

    def forward(self, x):
        y = self.inner(x)
        return y, self.loss(self, y)


def balance(block, y):
    p = block.router(y.detach()).softmax(-1)
    return (nn.functional.one_hot(p.argmax(-1), 3).to(p).mean(0) * p.mean(0)).sum()


def near(_, y):
    sizes = y.square().mean(1)
    return (sizes * (sizes < 5 * sizes.detach().mean())).mean()


SUMS = {
    "of squares": lambda _, y: y.square().sum(),
    "of each's variance": lambda _, y: y.var(1).sum(),
    "of logits": lambda block, y: block.router(y.detach()).logsumexp(-1).square().sum(),
}
MEANS = {
    "of squares": lambda _, y: y.square().mean(),
    "hinge": lambda _, y: (1 - y.norm(dim=1)).relu().mean(),
    "of logits": lambda block, y: block.router(y.detach()).logsumexp(-1).square().mean(),
    "penalty": lambda block, _: block.inner.weight.square().sum(),
}
OTHERS = {
    "variance": lambda _, y: y.var(0, unbiased=False).mean(),
    "a little variance": lambda _, y: y.square().mean() + 1e-4 * y.var(0, unbiased=False).mean(),
    "balance": balance,
    "near the mean": near,
    "largest": lambda _, y: y.max(),
    "those above": lambda _, y: y[y > 0].mean(),
    "first": lambda _, y: y[0].mean(),
    "scaled": lambda _, y: (y / y.detach().norm()).square().mean(),
    "root": lambda _, y: y.square().sum() / len(y) ** 0.5,
}
EVERY = {
    **{f"sum {n}": (f, Over.SUM) for n, f in SUMS.items()},
    **{f"mean {n}": (f, Over.SAMPLES) for n, f in MEANS.items()},
}
EVERY |= {name: (loss, None) for name, loss in OTHERS.items()}

MEAN, VARIANCE = MEANS["of squares"], OTHERS["variance"]


def pair(output, targets):
    return nn.functional.mse_loss(output, targets, reduction="sum"), output.numel()
