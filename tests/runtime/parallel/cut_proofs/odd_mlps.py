"""MLPs and experts that look as if they could be cut: names and sizes are right, and what is between them is odd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN, TOKENS = 16, 4, 32, 16
SIZE = WIDTH // HEADS


class Mlp(nn.Module):
    """x + fc2(between(fc1(norm(x))))."""

    outputs = HIDDEN

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, self.outputs), nn.Linear(HIDDEN, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """Make what is between."""

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.between(self.fc1(self.norm(x))))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class SoftmaxBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class NormalisedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.normalize(y, dim=-1)


class LayerNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.LayerNorm(HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(F.gelu(y))  # type: ignore[no-any-return]


class BareLayerNormBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.layer_norm(y, (y.shape[-1],))


class GroupNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.GroupNorm(4, HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(y.mT).mT  # type: ignore[no-any-return]


class InstanceNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.InstanceNorm1d(HIDDEN, affine=True)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(y.mT).mT  # type: ignore[no-any-return]


class ScaledBetween(Mlp):
    """A weight per feature, multiplied in between."""

    def set_up(self) -> None:
        self.scale = nn.Parameter(torch.linspace(0.5, 2, HIDDEN))

    def between(self, y: Tensor) -> Tensor:
        return y * self.scale


class SlopeBetween(Mlp):
    """One weight for all features."""

    def set_up(self) -> None:
        self.slope = nn.Parameter(torch.tensor(0.3))

    def between(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, y, self.slope * y)


class PReLUBetween(Mlp):
    def set_up(self) -> None:
        self.act = nn.PReLU()

    def between(self, y: Tensor) -> Tensor:
        return self.act(y)  # type: ignore[no-any-return]


class SquareBetween(Mlp):
    """A product of features with features."""

    def set_up(self) -> None:
        self.mixing = nn.Parameter(torch.eye(HIDDEN) + 0.1)

    def between(self, y: Tensor) -> Tensor:
        return y @ self.mixing


class HalvesBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat((second, first), -1)


class RolledBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.roll(1, -1)


class MaxedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y - y.amax(-1, keepdim=True)


class SortedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.sort(-1).values


class TopBetween(Mlp):
    """Only the largest features stay."""

    def between(self, y: Tensor) -> Tensor:
        return y * (y >= y.kthvalue(HIDDEN // 2 if y.shape[-1] == HIDDEN else 1, -1, keepdim=True).values)


class CountedBetween(Mlp):
    """Asks how many features there are."""

    def between(self, y: Tensor) -> Tensor:
        return y / y.shape[-1] ** 0.5


class PositionBetween(Mlp):
    """Each feature knows its number."""

    def between(self, y: Tensor) -> Tensor:
        return y * torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device).sqrt()


class ResidualBetween(Mlp):
    def forward(self, x: Tensor) -> Any:
        y = self.fc1(self.norm(x))
        return self.fc2(y + x.repeat(1, 1, HIDDEN // WIDTH))


class GatedByInput(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.fc1(x) * x.mean(-1, keepdim=True).sigmoid())


class SharedInput(Mlp):
    """Two rows take the same column."""

    def set_up(self) -> None:
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y) + self.down(y)


class TwiceUsed(Mlp):
    """The column is run on two inputs."""

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(self.fc1(x)) * self.fc1(2 * x).sigmoid())


class Recurrent(Mlp):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = x + self.fc2(F.gelu(self.fc1(x)))
        return x


class ColumnLeaks(Mlp):
    """Output of the column layer is used beside the row layer."""

    def forward(self, x: Tensor) -> Any:
        y = self.fc1(x)
        return x + self.fc2(F.gelu(y)) + y.mean(-1, keepdim=True)


class SharedBias(Mlp):
    def set_up(self) -> None:
        self.fc1.bias = None
        self.both = nn.Parameter(torch.full((HIDDEN,), 0.1))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y + self.both) + self.both


class TiedPair(Mlp):
    """The row's weight is the column's, turned round."""

    def forward(self, x: Tensor) -> Any:
        return x + F.gelu(self.fc1(x)) @ self.fc1.weight + self.fc2(F.gelu(self.fc1(x)))


class DirectWeight(Mlp):
    """The row's weight is used without calling it."""

    def forward(self, x: Tensor) -> Any:
        return x + F.linear(F.gelu(self.fc1(x)), self.fc2.weight, self.fc2.bias)


class SlicedWeight(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(F.linear(x, self.fc1.weight[: HIDDEN // 2]).repeat(1, 1, 2)))


class EinsumWeight(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + torch.einsum("bth,dh->btd", F.gelu(self.fc1(x)), self.fc2.weight)


class WeightNormed(Mlp):
    def set_up(self) -> None:
        torch.nn.utils.parametrizations.weight_norm(self.fc1)


class SpectralNormed(Mlp):
    def set_up(self) -> None:
        torch.nn.utils.parametrizations.spectral_norm(self.fc2)


class InPlaceBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.mul_(2).relu_()


class DroppedBetween(Mlp):
    def set_up(self) -> None:
        self.dropout = nn.Dropout(0.4)

    def between(self, y: Tensor) -> Tensor:
        return self.dropout(F.gelu(y))  # type: ignore[no-any-return]


class Penalised(Mlp):
    """A loss beside the output, of what is between."""

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y), y.square().sum() * 1e-3


class Gates(Mlp):
    outputs = 2 * HIDDEN

    def set_up(self) -> None:
        self.gate_up_proj, self.down_proj = self.fc1, self.fc2
        del self.fc1, self.fc2

    def forward(self, x: Tensor) -> Any:
        return x + self.down_proj(self.gate(self.gate_up_proj(x)))

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


class GatesInTurns(Gates):
    def gate(self, both: Tensor) -> Tensor:
        return F.silu(both[..., ::2]) * both[..., 1::2]


class GatesCrossed(Gates):
    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up.flip(-1)


class Mixture(nn.Module):
    """Experts that are MLPs, all of them run and weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class ChosenMixture(Mixture):
    """Each token passes the expert that its gate says."""

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        best = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
        return x + sum((weights * best)[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


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


class TokensMixed(Mlp):
    """An MLP over tokens, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(TOKENS, HIDDEN), nn.Linear(HIDDEN, TOKENS)

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x).mT))).mT


class ConvolvedTokens(Mlp):
    def set_up(self) -> None:
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.conv(F.pad(y.mT, (2, 0))).mT  # type: ignore[no-any-return]


class ConvolvedOutside(Mlp):
    def set_up(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.conv(F.pad(x.mT, (2, 0))).mT)


class Pooled(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + x.mean(1, keepdim=True)


class Shifted(Mlp):
    """Each token sees the one before it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(F.pad(x, (0, 0, 1, -1)))


class Positioned(Mlp):
    """Adds positions that it counts itself."""

    def set_up(self) -> None:
        self.positions = nn.Embedding(4 * TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.positions(torch.arange(x.shape[1], device=x.device)))


class Summed(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.cumsum(1) / 4)


class TiedInside(nn.Module):
    """Two MLPs that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp()
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))
