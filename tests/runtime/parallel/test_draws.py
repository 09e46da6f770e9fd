"""Blocks draw what one process draws, besides the masks of an nn.Dropout too, on every mesh and schedule."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Engine, MoE
from quintsched.runtime.blocks.block_builders import Blocks

from ...helpers.training import train_ranks

WIDTH, LENGTH, SAMPLES = 8, 8, 8


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(len(output))


def of_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(output.shape[:2].numel())


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def losses_of(plan: qs.Plan, blocks: Blocks, loss: Any = squares, **options: Any) -> list[float]:
    """The losses of some steps and of an evaluation, the same on all ranks."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(step)
        return tuple(torch.randn(2, SAMPLES, LENGTH, WIDTH, generator=random, dtype=torch.float64))

    given = {"dtype": torch.float64, "seed": 3, "evaluated": batch(1)} | options
    every = [found.losses for found in train_ranks(plan, blocks, loss, slow_sgd, [batch(0), batch(1)], **given)]
    assert all(found == pytest.approx(every[0], rel=1e-12) for found in every)
    return every[0]


def plain(blocks: Blocks, microbatches: int = 4) -> list[float]:
    """The losses of one process."""
    return losses_of(qs.compile("1f1b", mesh="dp=1", microbatches=microbatches), blocks)


def engine_of(*blocks: Any, **options: Any) -> Engine:
    return Engine(qs.compile("1f1b", mesh="dp=1", microbatches=1), blocks, squares, slow_sgd, **options)


class PerSample(nn.Module):
    """Draws by functions that are keyed by samples."""

    def __init__(self):
        super().__init__()
        self.mix, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        x = self.layer(x)
        x = x + self.attention(x, x, x)[0]  # with its weights, which it drops by a dropout
        x = x + functional.dropout(self.mix(x), 0.2, self.training) + torch.dropout(x, 0.1, True)
        q, k, v = (part.view(*part.shape[:2], 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, is_causal=True)
        return functional.layer_norm(x + seen.transpose(1, 2).flatten(2), (WIDTH,))


class PerUnit(PerSample):
    """Draws by torch's generators as well."""

    def __init__(self):
        super().__init__()
        self.slopes, self.channels = nn.RReLU(), nn.Dropout1d(0.3)
        self.alpha, self.features = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        x = super().forward(x) * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)
        x = x + self.alpha(self.features(self.channels(self.slopes(x))))
        noise = torch.randn_like(x) + torch.rand(x.shape[0], 1, WIDTH, dtype=x.dtype, device=x.device)
        x = x + 0.1 * noise + functional.gumbel_softmax(x) + torch.empty_like(x).exponential_()
        x = torch.where(torch.rand([], device=x.device) < 0.5, x, 1.1 * x)
        x = x + self.recurrent(x)[0]
        return functional.layer_norm(x[:, torch.randperm(LENGTH, device=x.device)], (WIDTH,))


@functools.cache
def one_process() -> list[float]:
    return plain([PerUnit] * 2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "more"),
    [
        ("zb-h1", "pp=2", {}),
        ("1f1b", "pp=2", {"recompute": 1}),
        ("dualpipe", "pp=2", {}),
        ("1f1b", "dp=2,pp=2", {"recompute": 2}),
        ("1f1b", "dp=2", {"zero": 3}),
    ],
)
def test_a_mesh_and_a_schedule_draw_what_one_process_draws(schedule: str, mesh: str, more: dict[str, Any]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2 if "dp" in mesh else 4, **more)
    assert losses_of(plan, [PerUnit] * 2) == pytest.approx(one_process(), rel=1e-9)


def test_no_cut_of_the_batch_changes_what_samples_draw() -> None:
    expected = plain([PerSample] * 2, 8)
    assert plain([PerSample] * 2, 1) == pytest.approx(expected, rel=1e-9)
    assert losses_of(qs.compile("1f1b", mesh="dp=2", microbatches=2), [PerSample] * 2) == pytest.approx(expected)


class Checkpointed(nn.Module):
    """Two parts that draw, each of which a backward may run again by itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.reentrant = nn.Dropout(0.4), reentrant

    def part(self, x):
        return x + functional.dropout(self.first(x), 0.3).tanh()

    def other(self, x):
        return x + self.drop(torch.sigmoid(self.second(x) * torch.randn_like(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.other(self.part(x))
        x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return checkpoint(self.other, x, use_reentrant=self.reentrant)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # where shapes are found
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_checkpointed_parts_of_a_block_draw_again_what_they_drew(schedule: str, reentrant: bool) -> None:
    def blocks(reentrant):
        return [lambda: nn.Linear(WIDTH, WIDTH), nn.Identity, *[lambda: Checkpointed(reentrant)] * 3]

    found = losses_of(qs.compile(schedule, mesh="pp=2", microbatches=4), blocks(reentrant))
    assert found == pytest.approx(plain(blocks(None)), rel=1e-9)


class Repeated(nn.Module):
    """A dropout of two parts, each of which a backward runs again."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def part(self, x):
        return self.drop(self.layer(x).tanh())

    def forward(self, x):
        x = checkpoint(self.part, x, use_reentrant=False)
        return checkpoint(self.part, x, use_reentrant=False)


class Unkept(nn.Linear):
    """Draws other numbers when it is run again."""

    def noisy(self, x):
        return super().forward(x) * torch.rand_like(x)

    def forward(self, x):
        return checkpoint(self.noisy, x, use_reentrant=False, preserve_rng_state=False)


class Hooking(Unkept):
    """Draws in a backward, by a hook."""

    def forward(self, x):
        x = self.noisy(x)
        x.register_hook(lambda gradient: functional.dropout(gradient, 0.5))
        return x


class NoisyLinear(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return functional.dropout(super().forward(x), 0.1)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (lambda: [Repeated(), Repeated()], r"'1.drop' draws several times in a forward and is run again within a b"),
        (lambda: [Unkept(8, 8)], r"blocks 0 draw by .* in a backward what no forward has drawn; let torch"),
        (lambda: [Hooking(8, 8)], r"blocks 0 draw by .* in a backward what no forward has drawn; let torch"),
        (lambda: [MoE(8, 2, NoisyLinear, top_k=1)], "block 0 draws by dropout within experts, whose rows are no"),
    ],
)
def test_draws_that_would_be_others_are_refused(blocks: Any, says: str) -> None:
    engine = engine_of(*blocks())
    with pytest.raises(qs.MisfitError, match=says):
        engine.step(*torch.randn(2, 2, 3, WIDTH))


class Layer(nn.Module):
    """GPT-2's kind: dropout of attention, of the features between two products, and of what leaves."""

    def __init__(self, core=False):
        super().__init__()
        self.attn, self.mlp = Attention(core), Features()

    def forward(self, x):
        x = x + functional.dropout(self.attn(x), 0.2, self.training)
        keep = x.new_empty(len(x), 1, 1).bernoulli_(0.5) if self.training else 1
        x = x + functional.dropout(self.mlp(x), 0.2, self.training) * keep
        return functional.layer_norm(x, (WIDTH,))


class Attention(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.core = core

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, is_causal=True)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        seen = checkpoint(self.attend, q, k, v, use_reentrant=False) if self.core else self.attend(q, k, v)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(functional.dropout(functional.gelu(self.fc1(x)), 0.2, self.training))


HEADS = {"*.attn.[qkv]_proj": "column", "*.attn.o_proj": "row"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("core", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_shards_of_heads_and_features_draw_their_shards(mesh: str, core: bool) -> None:
    overlaps = {"schedule": "dualpipe", "overlap": True} if "pp" in mesh else {"schedule": "1f1b"}
    plan = qs.compile(**overlaps, mesh=mesh, microbatches=2 if "dp" in mesh else 4)
    found = losses_of(plan, [lambda: Layer(core)] * 2, rules=HEADS)
    assert found == pytest.approx(plain([Layer] * 2), rel=1e-9)


def test_slices_of_tokens_draw_their_slices() -> None:
    blocks: Blocks = [lambda: nn.Linear(WIDTH, WIDTH), Layer, lambda: nn.Linear(WIDTH, WIDTH)]
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=4)
    assert losses_of(plan, blocks, sequence_parallel=True, rules=HEADS) == pytest.approx(plain(blocks), rel=1e-9)


class Between(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.fc1, self.fc2, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x, past=None, context=None):
        y = self.fc1(x)
        return x + self.fc2(self.draw(y) if self.training else y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "mesh", "slices", "part"),
    [
        ("1f1b", "cp=2", 1, "the tokens"),
        ("seq-1f1b", "pp=1", 2, "the tokens"),
        ("1f1b", "tp=2", 1, "features, between the layers of a pair"),
    ],
)
def test_draws_for_a_part_are_refused_but_for_dropouts_and_samples(schedule, mesh, slices, part):
    def losses(plan, draw):
        rules = {"*.fc1": "column", "*.fc2": "row"} if plan.mesh.axis_size("tp") > 1 else {}
        return losses_of(plan, [lambda: Between(draw)] * 2, loss=of_tokens, rules=rules)

    def draw(x):
        return functional.dropout(x, 0.2) * torch.rand(len(x), 1, 1, dtype=x.dtype)

    plan = qs.compile(schedule, mesh=mesh, slices=slices, microbatches=2)
    with pytest.raises(qs.MisfitError, match=f"draws by randn_like for its part of {part}"):
        losses(plan, lambda x: x + torch.randn_like(x))
    expected = losses(qs.compile("1f1b", mesh="pp=1", microbatches=2), draw)
    assert losses(plan, draw) == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.")
def test_blocks_that_draw_are_not_compiled_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(NoisyLinear(), compiled=True)
    for _ in range(2):
        engine.step(*torch.randn(2, 4, WIDTH))
    assert caplog.messages == ["blocks 0 draw random numbers other than by nn.Dropout, and are not compiled"]
