"""Blocks draw what one process draws, besides the masks of an nn.Dropout too, on every mesh and schedule.

Torch's own generators are seeded round a block, and as they were behind it, also where ranks are threads.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Engine, MoE, Transport, run_local
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm.random_generators import SeededGenerators
from quintsched.runtime.parallel.mesh_independent_dropout import Masks, MaskUnit
from quintsched.runtime.parallel.seeded_block_draws import BlockDraws

from ...helpers.blocks import of_kind
from ...helpers.training import random_batch, squares, train_ranks

WIDTH, LENGTH, SAMPLES = 8, 8, 8


def of_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(output.shape[:2].numel())


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def losses_of(plan: qs.Plan, blocks: Blocks, loss: Any = squares, **options: Any) -> list[float]:
    """The losses of some steps and of an evaluation, the same on all ranks."""
    batches = [random_batch(step, SAMPLES, LENGTH, WIDTH) for step in range(2)]
    given = {"dtype": torch.float64, "seed": 3, "evaluated": batches[1]} | options
    every = [found.losses for found in train_ranks(plan, blocks, loss, slow_sgd, batches, **given)]
    assert all(found == pytest.approx(every[0], rel=1e-12) for found in every)
    return every[0]


def plain(blocks: Blocks, microbatches: int = 4) -> list[float]:
    """The losses of one process."""
    return losses_of(qs.compile("1f1b", mesh="dp=1", microbatches=microbatches), blocks)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def engine_of(*blocks: Any, optimizer: Any = slow_sgd, **options: Any) -> Engine:
    return Engine(qs.compile("1f1b", mesh="dp=1", microbatches=1), blocks, squares, optimizer, **options)


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


one_process = cache(lambda: plain([PerUnit] * 2))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "more"),
    [
        ("zb-h1", "pp=2", {}),
        ("1f1b", "pp=2", {"recompute": 1}),
        ("dualpipe", "pp=2", {}),
        ("1f1b", "dp=2,pp=2", {"recompute": 1}),
        ("1f1b", "dp=2", {"zero": 3}),
    ],
)
def test_a_mesh_and_a_schedule_draw_what_one_process_draws(schedule: str, mesh: str, more: dict[str, Any]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2 if "dp" in mesh else 4, **more)
    assert losses_of(plan, [PerUnit] * 2) == pytest.approx(one_process(), rel=1e-9)


@pytest.mark.slow
def test_no_cut_of_the_batch_changes_what_samples_draw() -> None:
    expected = plain([PerSample] * 2, 8)
    assert plain([PerSample] * 2, 1) == pytest.approx(expected, rel=1e-9)
    assert losses_of(qs.compile("1f1b", mesh="dp=2", microbatches=2), [PerSample] * 2) == pytest.approx(expected)


class Checkpointed(nn.Module):
    """Two parts that draw, each of which a backward may run again by itself, or within the whole."""

    def __init__(self, reentrant, *, nested=False):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.reentrant, self.nested = nn.Dropout(0.4), reentrant, nested

    def part(self, x):
        return x + functional.dropout(self.first(x), 0.3).tanh()

    def other(self, x):
        return x + self.drop(torch.sigmoid(self.second(x) * torch.randn_like(x)))

    def both(self, x):
        if self.reentrant is None:
            return self.other(self.part(x))
        x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return checkpoint(self.other, x, use_reentrant=self.reentrant)

    def forward(self, x):
        return checkpoint(self.both, x, use_reentrant=self.reentrant) if self.nested else self.both(x)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # where shapes are found
@pytest.mark.parametrize(("reentrant", "nested"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_checkpointed_parts_of_a_block_draw_again_what_they_drew(schedule: str, reentrant: bool, nested: bool) -> None:
    def blocks(*how, **more):
        return [lambda: nn.Linear(WIDTH, WIDTH), nn.Identity, *[lambda: Checkpointed(*how, **more)] * 3]

    plan = qs.compile(schedule, mesh="pp=2", microbatches=4, recompute=int(nested))
    assert losses_of(plan, blocks(reentrant, nested=nested)) == pytest.approx(plain(blocks(None)), rel=1e-9)


def repeated(self, x):
    """Drop out twice in one place, each time in a part that a backward runs again."""
    x = checkpoint(self.other, x, use_reentrant=False)
    return checkpoint(self.other, x, use_reentrant=False)


def noisy(self, x):
    return nn.Linear.forward(self, x) * torch.rand_like(x)


def unkept(self, x):
    """Draw other numbers when run again."""
    return checkpoint(noisy, self, x, use_reentrant=False, preserve_rng_state=False)


Unkept, Repeated = of_kind(nn.Linear, unkept), of_kind(Checkpointed, repeated)
NoisyLinear = of_kind(nn.Linear, lambda self, x: functional.dropout(nn.Linear.forward(self, x), 0.1))


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (lambda: [Repeated(None), Repeated(None)], r"'1.drop' draws several times in a forward and is run again w"),
        (lambda: [Unkept(8, 8)], r"blocks 0 draw by .* in a backward what no forward has drawn; let torch"),
        (
            lambda: [MoE(8, 2, lambda: NoisyLinear(8, 8), top_k=1)],
            "block 0 draws by dropout within experts, whose rows are no",
        ),
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
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2, self.core = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), core

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, is_causal=True)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        seen = checkpoint(self.attend, q, k, v, use_reentrant=False) if self.core else self.attend(q, k, v)
        x = x + functional.dropout(self.o_proj(seen.transpose(1, 2).flatten(2)), 0.2, self.training)
        keep = x.new_empty(len(x), 1, 1).bernoulli_(0.5) if self.training else 1
        grown = functional.dropout(functional.gelu(self.fc1(x)), 0.2, self.training)
        return functional.layer_norm(x + functional.dropout(self.fc2(grown), 0.2, self.training) * keep, (WIDTH,))


HEADS = {"*.[qkv]_proj": "column", "*.o_proj": "row"}


REPLICAS = {"mesh": "dp=2,tp=2", "microbatches": 2}
OVERLAPS = {"schedule": "dualpipe", "mesh": "pp=2,tp=2", "overlap": True}


@pytest.mark.parametrize(
    ("asked", "core", "more"),
    [
        ({}, False, {"sequence_parallel": True}),
        *(pytest.param(REPLICAS, core, {}, marks=pytest.mark.slow) for core in (False, True)),
        *(pytest.param(OVERLAPS, core, {}, marks=pytest.mark.slow) for core in (False, True)),
    ],
)
def test_shards_of_heads_features_and_tokens_draw_their_shards(asked: Any, core: bool, more: Any) -> None:
    plan = qs.compile(**{"schedule": "1f1b", "mesh": "tp=2", "microbatches": 4} | asked)
    blocks: list[Blocks] = [[layer, partial(nn.Linear, WIDTH, WIDTH)] for layer in (partial(Layer, core), Layer)]
    assert losses_of(plan, blocks[0], rules=HEADS, **more) == pytest.approx(plain(blocks[1]), rel=1e-9)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.")
def test_blocks_that_draw_are_not_compiled_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(NoisyLinear(WIDTH, WIDTH), compiled=True)
    for _ in range(2):
        engine.step(*torch.randn(2, 4, WIDTH))
    assert caplog.messages == ["blocks 0 draw random numbers other than by nn.Dropout, and are not compiled"]


@pytest.fixture
def draws() -> Any:
    masks = Masks(0)
    mode = BlockDraws(masks, {0: nn.Identity()})

    def run(function: Callable[[], Any]) -> Any:
        with masks.draw_for(MaskUnit(0, range(4))), mode.running(0):
            return function()

    return run


def test_attention_without_dropout_in_effect_is_that_of_torch(draws: Any) -> None:
    q, k, v = torch.randn(3, 4, 2, 5, 8, dtype=torch.float64)
    mask = torch.rand(5, 5) < 0.6
    mask[1] = False
    masks: list[dict[str, Any]] = [{"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.double()}]
    for heads, options in ((1, {"enable_gqa": True}), (2, {"scale": 0.3}), (2, {}), *((2, some) for some in masks)):
        given = partial(functional.scaled_dot_product_attention, q, k[:, :heads], v[:, :heads], **options)
        assert torch.allclose(draws(partial(given, dropout_p=1e-12)), given(), atol=1e-12)


def _seeded_by_hand(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(8, generator=generator), torch.empty(3).normal_(generator=generator)


def _seeded_in_a_fork(seed: int) -> tuple[Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(4), functional.dropout(torch.ones(16)), torch.randperm(8)


@pytest.mark.parametrize("seeded", [_seeded_by_hand, _seeded_in_a_fork])
def test_numbers_that_follow_from_a_seed_in_the_forward_are_plain_torchs(seeded: Any, draws: Any) -> None:
    for seed in (0, 5):
        torch.manual_seed(0)
        expected = seeded(seed)
        torch.rand(1)
        found = draws(lambda s=seed: (seeded(s), torch.rand(4)))
        assert all(map(torch.equal, found[0], expected))
        assert torch.equal(found[1], draws(lambda s=seed: (seeded(s), torch.rand(4)))[1])


def test_a_generator_that_lives_on_is_refused(draws: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    draws(lambda: torch.rand(4, generator=generator))
    with pytest.raises(qs.MisfitError, match="not seeded in this forward"):
        draws(lambda: torch.rand(4, generator=generator))


def test_steps_do_not_move_the_generator_of_the_loop_and_go_on_after_a_resume() -> None:
    """At a rate of 0 and on one batch, where losses differ by their draws alone."""
    blocks = [lambda: nn.Linear(WIDTH, WIDTH), lambda: Checkpointed(False)]
    engine, resumed, other = (engine_of(*blocks, seed=seed, optimizer=still) for seed in (1, 1, 2))
    batch, before = torch.randn(2, 4, WIDTH), torch.get_rng_state()
    first, fresh = engine.step(*batch).loss.item(), resumed.full_weights()
    resumed.load_state_dict(engine.state_dict())
    other.set_weights(fresh)
    losses = [one.step(*batch).loss.item() for one in (engine, resumed, other)]
    assert losses[0] == losses[1]
    assert len({first, *losses}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_thread_that_waits_lets_others_draw() -> None:
    def run(transport: Transport) -> list[Tensor]:
        device, found = torch.device("cpu"), []
        with SeededGenerators(transport.rank, device), SeededGenerators(transport.rank, device):
            for _ in range(3):
                found.append(torch.rand(2))
                transport.world_group().all_reduce(torch.zeros(1)).wait()
        return found

    before = torch.get_rng_state()
    for rank, found in enumerate(run_local(3, run)):
        generator = torch.Generator().manual_seed(rank)
        assert all(torch.equal(one, torch.rand(2, generator=generator)) for one in found)
    assert torch.equal(torch.get_rng_state(), before)
