"""One rank on one GPU, without any message: halves bit for bit, attention of blocks, waits and memory."""

import warnings

import pytest
import torch

import quintsched as qs
from quintsched.runtime.parallel.context import block_attention
from quintsched.runtime.parallel.context.block_attention import PLAIN_KERNEL, Kernel, attend, choose, gradients
from quintsched.runtime.parallel.mesh_independent_dropout import Masks, MaskUnit, key_dropouts
from tests.runtime.parallel.lively import moe_blocks
from tests.runtime.toys import ids_task, tiny_gpt

from .machine import Machine
from .runs import FLOAT32
from .tiny_engines import LENGTH, SAMPLES, engine_of, require_same_bits, train

pytestmark = pytest.mark.ranks(1)

SPLIT = [("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2), ("interleaved-1f1b", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), SPLIT)
def test_in_bf16_chunks_and_halves_change_no_bit(machine: Machine, schedule: str, chunks: int) -> None:
    plans = (qs.compile(name, mesh="pp=1", microbatches=4, chunks=v) for name, v in ((schedule, chunks), ("1f1b", 1)))
    found, expected = (train(engine_of(machine.alone(), plan, torch.bfloat16)) for plan in plans)
    assert found[1].keys() == expected[1].keys()
    require_same_bits(found, expected)


def test_a_dropout_draws_what_it_draws_on_the_host(machine: Machine) -> None:
    layer, masks = torch.nn.Dropout(0.3), Masks(0)
    key_dropouts(layer, 0, masks)
    found = []
    for device in (machine.device, "cpu"):
        with masks.draw_for(MaskUnit(7, range(8, 16), torch.arange(4, 8, device=device))):
            found.append(layer(torch.ones(8, 4, 300, device=device)).cpu())
    assert torch.equal(*found)


KERNELS = {
    torch.float64: block_attention.PLAIN_KERNEL,
    torch.float32: block_attention.CUDA_EFFICIENT,
    torch.bfloat16: block_attention.CUDA_FLASH,
    torch.float16: block_attention.CUDA_FLASH,
}
BLOCKS = [(72, 72, True), (36, 72, False), (72, 36, False), (256, 256, True)]


def kernels_for(machine: Machine, key: torch.Tensor) -> list[Kernel]:
    """Return the one that is chosen, which on a GPU is known, and the other that takes half precision there."""
    chosen = choose(key)
    if key.device.type != "cuda":
        return [chosen]
    assert chosen is KERNELS[key.dtype]
    halves = chosen is block_attention.CUDA_FLASH
    return [chosen, block_attention.CUDA_EFFICIENT] if halves else [chosen]


@pytest.mark.parametrize(("queries", "keys", "is_diagonal"), BLOCKS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", KERNELS, ids=str)
def test_a_block_of_a_ring_is_attention(machine, dtype, groups: int, queries: int, keys: int, is_diagonal) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(2, 2, groups, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64), (2, 2, groups, queries, 64)]
    query, key, value, gradient = (
        torch.randn(shape, generator=random, dtype=torch.float64).to(machine.device, dtype) for shape in shapes
    )
    exact = query.double(), key.double(), value.double()
    mean, weight = attend(PLAIN_KERNEL, exact, is_diagonal)
    expected = mean, *gradients(PLAIN_KERNEL, gradient.double(), exact, mean, weight, is_diagonal)
    tolerance = {torch.float64: 1e-12, torch.float32: FLOAT32}.get(dtype, torch.finfo(dtype).eps)
    seen, narrow = mean.to(dtype), weight.to(block_attention.wide(dtype))
    for kernel in kernels_for(machine, key):
        found, by = attend(kernel, (query, key, value), is_diagonal)
        back = gradients(kernel, gradient, (query, key, value), seen, narrow, is_diagonal)
        assert (by - weight).abs().max() <= max(tolerance / 8, 1e-12), kernel.name
        for one, other in zip((found, *back), expected, strict=True):
            assert (one.double() - other).norm() <= tolerance * other.norm(), kernel.name


@pytest.mark.parametrize("with_experts", [False, True])
def test_a_step_waits_for_the_device_once(machine: Machine, with_experts: bool) -> None:
    """Wait only for the gradient norm, which says whether the step counts; experts that pad add no wait."""
    machine.require_cuda("a CPU is not waited for")
    blocks = moe_blocks(16, capacity_factor=1.25, pad_to_capacity=True) if with_experts else None
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=4)
    engine = engine_of(machine.alone(), plan, torch.bfloat16, blocks)
    batches = [(inputs.cuda(), targets.cuda()) for inputs, targets in ids_task(3, SAMPLES, LENGTH).batches]
    for batch in batches[:2]:
        engine.step(*batch)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step(*batches[2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in heard if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1, waits


def test_memory_is_that_of_the_simulator(machine: Machine) -> None:
    """Compare a GPU's allocations in a step with the simulator's peak of activations, plus workspace of products.

    `benchmarks/gpu.py` measures how close they are on a model of usual size.
    """
    machine.require_cuda("an allocator that counts")
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=8)
    engine = engine_of(machine.alone(), plan, torch.float32, tiny_gpt(256))
    batches = [(inputs.cuda(), targets.cuda()) for inputs, targets in ids_task(3, 64, 256).batches]
    engine.step(*batches[0])
    _, saved = engine.step_counting_saved(*batches[1])
    expected = plan.simulate(engine.saved_costs(saved)).peak_activations[0]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.step(*batches[2])
    assert 0.9 * expected <= torch.cuda.max_memory_allocated() - before <= 1.5 * expected
