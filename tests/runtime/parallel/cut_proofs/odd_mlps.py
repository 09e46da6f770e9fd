"""MLPs and experts that look as if they could be cut: names and sizes are right, and what is between them is odd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

WIDTH, HEADS, HIDDEN, TOKENS = 16, 4, 32, 16
SIZE = WIDTH // HEADS


class Mlp(nn.Module):
    """x + fc2(between(fc1(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        for name, value in self.has().items():
            setattr(self, name, value)

    def has(self) -> Mapping[str, Any]:
        """Attributes that a kind has besides, or instead."""
        return {}

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.between(self.fc1(self.norm(x))))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class Gates(Mlp):
    """Gates and values of one product."""

    def has(self) -> Mapping[str, Any]:
        return {"fc1": None, "gate_up_proj": nn.Linear(WIDTH, 2 * HIDDEN), "fc2": None, "down_proj": self.fc2}

    def forward(self, x: Tensor) -> Any:
        gate, up = self.split(self.gate_up_proj(x))
        return x + self.down_proj(F.silu(gate) * up)

    def split(self, both: Tensor) -> Any:
        return both.chunk(2, -1)


class Mixture(nn.Module):
    """Experts that are MLPs, all of them run and weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights = self.weights(self.gate(x).softmax(-1))
        return x + sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))

    def weights(self, gates: Tensor) -> Tensor:
        return gates


class FusedExperts(nn.Module):
    """Weights of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
        self.experts.down_proj = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 6)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(torch.einsum("btd,edh->bteh", x, self.experts.up_proj))
        return x + torch.einsum("bteh,ehd,bte->btd", y, self.experts.down_proj, self.gate(x).softmax(-1))


class TiedInside(nn.Module):
    """Two MLPs that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Mlp()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class Recurrent(Mlp):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = x + self.fc2(F.gelu(self.fc1(x)))
        return x


class TopBetween(Mlp):
    """Only the largest features stay."""

    def between(self, y: Tensor) -> Tensor:
        return y * (y >= y.kthvalue(HIDDEN // 2 if y.shape[-1] == HIDDEN else 1, -1, keepdim=True).values)


class SharedInput(Mlp):
    """Two rows take the same column."""

    def has(self) -> Mapping[str, Any]:
        return {"down": nn.Linear(HIDDEN, WIDTH)}

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y) + self.down(y)


class ColumnLeaks(Mlp):
    """Output of the column layer is used beside the row layer."""

    def forward(self, x: Tensor) -> Any:
        y = self.fc1(x)
        return x + self.fc2(F.gelu(y)) + y.mean(-1, keepdim=True)


class Penalised(Mlp):
    """A loss beside the output, of what is between."""

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y), y.square().sum() * 1e-3


KINDS: Mapping[type[nn.Module], Mapping[str, Mapping[str, Any]]] = {
    Mlp: {
        "SoftmaxBetween": {"between": lambda self, y: y.softmax(-1)},
        "NormalisedBetween": {"between": lambda self, y: F.normalize(y, dim=-1)},
        "BareLayerNormBetween": {"between": lambda self, y: F.layer_norm(y, (y.shape[-1],))},
        "HalvesBetween": {"between": lambda self, y: torch.cat((y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1)},
        "RolledBetween": {"between": lambda self, y: y.roll(1, -1)},
        "MaxedBetween": {"between": lambda self, y: y - y.amax(-1, keepdim=True)},
        "SortedBetween": {"between": lambda self, y: y.sort(-1).values},
        "CountedBetween": {"between": lambda self, y: y / y.shape[-1] ** 0.5},
        "PositionBetween": {
            "between": lambda self, y: y * torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device).sqrt()
        },
        "InPlaceBetween": {"between": lambda self, y: y.mul_(2).relu_()},
        "LayerNormBetween": {
            "has": lambda self: {"inner": nn.LayerNorm(HIDDEN)},
            "between": lambda self, y: self.inner(F.gelu(y)),
        },
        "GroupNormBetween": {
            "has": lambda self: {"inner": nn.GroupNorm(4, HIDDEN)},
            "between": lambda self, y: self.inner(y.mT).mT,
        },
        "InstanceNormBetween": {
            "has": lambda self: {"inner": nn.InstanceNorm1d(HIDDEN, affine=True)},
            "between": lambda self, y: self.inner(y.mT).mT,
        },
        "ScaledBetween": {  # a weight per feature
            "has": lambda self: {"scale": nn.Parameter(torch.linspace(0.5, 2, HIDDEN))},
            "between": lambda self, y: y * self.scale,
        },
        "SlopeBetween": {  # one weight for all features
            "has": lambda self: {"slope": nn.Parameter(torch.tensor(0.3))},
            "between": lambda self, y: torch.where(y > 0, y, self.slope * y),
        },
        "PReLUBetween": {"has": lambda self: {"act": nn.PReLU()}, "between": lambda self, y: self.act(y)},
        "SquareBetween": {  # a product of features with features
            "has": lambda self: {"mixing": nn.Parameter(torch.eye(HIDDEN) + 0.1)},
            "between": lambda self, y: y @ self.mixing,
        },
        "SharedBias": {
            "has": lambda self: {
                "fc1": nn.Linear(WIDTH, HIDDEN, bias=False),
                "both": nn.Parameter(torch.full((HIDDEN,), 0.1)),
            },
            "between": lambda self, y: F.gelu(y + self.both) + self.both,
        },
        "DroppedBetween": {
            "has": lambda self: {"dropout": nn.Dropout(0.4)},
            "between": lambda self, y: self.dropout(F.gelu(y)),
        },
        "WeightNormed": {"has": lambda self: {"fc1": weight_norm(self.fc1)}},
        "SpectralNormed": {"has": lambda self: {"fc2": spectral_norm(self.fc2)}},
        "ResidualBetween": {
            "forward": lambda self, x: self.fc2(self.fc1(self.norm(x)) + x.repeat(1, 1, HIDDEN // WIDTH))
        },
        "GatedByInput": {"forward": lambda self, x: self.fc2(self.fc1(x) * x.mean(-1, keepdim=True).sigmoid())},
        "TwiceUsed": {"forward": lambda self, x: x + self.fc2(F.gelu(self.fc1(x)) * self.fc1(2 * x).sigmoid())},
        "TiedPair": {  # the row's weight is the column's, turned round
            "forward": lambda self, x: x + F.gelu(self.fc1(x)) @ self.fc1.weight + self.fc2(F.gelu(self.fc1(x)))
        },
        "DirectWeight": {  # the row's weight is used without calling it
            "forward": lambda self, x: x + F.linear(F.gelu(self.fc1(x)), self.fc2.weight, self.fc2.bias)
        },
        "SlicedWeight": {
            "forward": lambda self, x: x + self.fc2(F.gelu(F.linear(x, self.fc1.weight[: HIDDEN // 2]).repeat(1, 1, 2)))
        },
        "EinsumWeight": {
            "forward": lambda self, x: x + torch.einsum("bth,dh->btd", F.gelu(self.fc1(x)), self.fc2.weight)
        },
        "TokensMixed": {  # an MLP over tokens, as in MLP-Mixer
            "has": lambda self: {"fc1": nn.Linear(TOKENS, HIDDEN), "fc2": nn.Linear(HIDDEN, TOKENS)},
            "forward": lambda self, x: x + self.fc2(F.gelu(self.fc1(self.norm(x).mT))).mT,
        },
        "ConvolvedTokens": {
            "has": lambda self: {"conv": nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN)},
            "between": lambda self, y: self.conv(F.pad(y.mT, (2, 0))).mT,
        },
        "ConvolvedOutside": {
            "has": lambda self: {"conv": nn.Conv1d(WIDTH, WIDTH, 3)},
            "forward": lambda self, x: Mlp.forward(self, self.conv(F.pad(x.mT, (2, 0))).mT),
        },
        "Pooled": {"forward": lambda self, x: Mlp.forward(self, x) + x.mean(1, keepdim=True)},
        "Shifted": {"forward": lambda self, x: Mlp.forward(self, F.pad(x, (0, 0, 1, -1)))},
        "Positioned": {  # adds positions that it counts itself
            "has": lambda self: {"positions": nn.Embedding(4 * TOKENS, WIDTH)},
            "forward": lambda self, x: Mlp.forward(self, x + self.positions(torch.arange(x.shape[1], device=x.device))),
        },
        "Summed": {"forward": lambda self, x: Mlp.forward(self, x.cumsum(1) / 4)},
    },
    Gates: {
        "GatesInTurns": {"split": lambda self, both: both.unflatten(-1, (-1, 2)).unbind(-1)},
        "GatesCrossed": {"split": lambda self, both: (both.chunk(2, -1)[0], both.chunk(2, -1)[1].flip(-1))},
    },
    Mixture: {  # each token passes the expert that its gate says
        "ChosenMixture": {"weights": lambda self, gates: gates * F.one_hot(gates.argmax(-1), 4)}
    },
}


def made(kinds: Mapping[type[nn.Module], Mapping[str, Mapping[str, Any]]]) -> dict[str, type[nn.Module]]:
    """Return the classes of a table, by their names."""
    return {name: type(name, (base,), dict(has)) for base, of_base in kinds.items() for name, has in of_base.items()}


CLASSES = (Gates, Mixture, FusedExperts, TiedInside, Recurrent, TopBetween, SharedInput, ColumnLeaks, Penalised)
ODD_MLPS = {kind.__name__: kind for kind in CLASSES} | made(KINDS)
