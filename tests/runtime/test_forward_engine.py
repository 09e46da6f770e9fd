"""Forward runs: outputs of one process on every kind of mesh, the memory of weights alone, weights of any training."""

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, ForwardEngine, Transport, build_model, run_local, split

from ..helpers.blocks import of_kind, of_layers
from ..helpers.training import run_engines
from .parallel.lively import moe_blocks
from .splitting.models import IDS as WORDS
from .splitting.models import NanoGPT
from .toys import adam, cross_entropy_sum, difference, tiny_gpt

LENGTH = 8
IDS = torch.randint(0, 10, (7, LENGTH), generator=torch.Generator().manual_seed(0))
BATCHES = [IDS, IDS[:4, : LENGTH // 2], IDS[:1]]
"""Uneven; shorter; and where two replicas share a sample, one has none."""


def run_on(
    plan: qs.Plan,
    blocks: Any,
    batches: Sequence[Tensor],
    load: Callable[[ForwardEngine], object] = lambda engine: None,
    **settings: Any,
) -> list[tuple[int, list[Any]]]:
    """Return of each rank its replica, and what it gives for each batch, which replicas share as evenly as can be."""

    def run(transport: Transport) -> tuple[int, list[Any]]:
        mine = copy.deepcopy(blocks) if isinstance(blocks, nn.Module) else blocks
        mine = split(mine, example=batches[0]) if isinstance(mine, nn.Module) else mine
        engine = ForwardEngine(plan, mine, dtype=torch.float64, transport=transport, **settings)
        load(engine)
        shares = (batch.tensor_split(engine.num_replicas)[engine.replica] for batch in batches)
        return engine.replica, [engine.run(share if engine.needs_inputs else None) for share in shares]

    return run_local(plan.mesh.size, run)


def require_equal(plan: qs.Plan, found: Sequence[tuple[int, Sequence[Any]]], expected: Sequence[Tensor]) -> None:
    """Every rank of the last stage has the samples of its replica, and no other rank has any."""
    last, count = plan.stage_to_pp[plan.routes[0].stages[-1]], len({replica for replica, _ in found})
    for rank, (replica, outputs) in enumerate(found):
        for output, whole in zip(outputs, expected, strict=True):
            mine = whole.tensor_split(count)[replica]
            if plan.mesh.pp_rank(rank) != last or not len(mine):
                assert output is None
            else:
                assert output.shape == mine.shape
                assert difference(output, mine) < 1e-12


@torch.no_grad()
def in_one_process(model: nn.Sequential, inputs: Tensor) -> Tensor:
    for block in model.eval():
        given = block(inputs)
        inputs = given[0] if isinstance(given, tuple) else given
    return inputs


CASES: list[tuple[str, dict[str, Any]]] = [
    ("pp=1", {}),
    ("pp=3", {}),
    ("dp=2", {}),
    ("tp=2", {}),
    ("cp=2", {}),
    ("pp=2,tp=2", {}),
    ("dp=2,cp=2,pp=2", {}),
    ("pp=2", {"chunks": 2}),
    ("pp=2,tp=2", {"stage_to_pp": [0, 1, 1, 0]}),
    ("dp=2,pp=2", {"zero": 3}),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("mesh", "request_"), CASES)
def test_outputs_are_those_of_one_process(mesh: str, request_: dict[str, Any]) -> None:
    blocks, plan = tiny_gpt(LENGTH), qs.compile("inference", mesh=mesh, microbatches=3, **request_)
    model = build_model(blocks, 1, torch.float64)
    weights = dict(model.named_parameters())
    found = run_on(plan, blocks, BATCHES, lambda engine: engine.set_weights(weights))
    require_equal(plan, found, [in_one_process(model, ids) for ids in BATCHES])


def test_experts_are_shared_out() -> None:
    blocks, plan = moe_blocks(capacity_factor=4.0), qs.compile("inference", mesh="dp=2,ep=2,pp=2", microbatches=2)
    model = build_model(blocks, 0, torch.float64)
    require_equal(plan, run_on(plan, blocks, BATCHES[:2]), [in_one_process(model, ids) for ids in BATCHES[:2]])


def test_models_that_are_split_give_their_own_outputs_with_weights_that_several_stages_hold() -> None:
    model, other = NanoGPT().double().eval(), NanoGPT().double()
    ids = torch.randint(0, WORDS, (5, 6), generator=torch.Generator().manual_seed(1))
    assert model.lm_head.weight is model.transformer.wte.weight
    blocks = split(model, example=ids)
    weights = {f"{number}.{name}": p for number, block in enumerate(blocks) for name, p in block.named_parameters()}
    plan = qs.compile("inference", mesh="pp=2", microbatches=2)
    found = run_on(plan, other, [ids], lambda engine: engine.set_weights(weights))
    with torch.no_grad():
        require_equal(plan, found, [model(ids)[0]])


Table = of_kind(nn.Linear, lambda self, x: {"y": nn.Linear.forward(self, x), "bias": self.bias})


def test_outputs_without_a_sample_dimension_are_given_once() -> None:
    engine = ForwardEngine(qs.compile("inference", mesh="pp=1", microbatches=4), [lambda: Table(3, 3)])
    assert {name: len(found) for name, found in engine.run(torch.randn(8, 3)).items()} == {"y": 8, "bias": 3}


Wide = of_layers(
    "Wide",
    lambda: {"fc1": nn.Linear(256, 256), "drop": nn.Dropout(0.5), "fc2": nn.Linear(256, 256)},
    lambda self, x: x + self.fc2(self.drop(self.fc1(x))),
)


def resident_bytes() -> dict[int, int]:
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in gc.get_objects():
            with suppress(RuntimeError, NotImplementedError):  # of fake tensors, which other tests have left
                if isinstance(one, Tensor) and one.device.type == "cpu":
                    storage = one.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "zero", "dtype"),
    [("pp=1", 0, torch.float32), ("pp=2,tp=2", 0, torch.bfloat16), ("dp=2", 3, torch.bfloat16)],
)
def test_ranks_hold_weights_and_nothing_else(mesh: str, zero: int, dtype: torch.dtype) -> None:
    plan = qs.compile("inference", mesh=mesh, microbatches=2, zero=zero)

    def run(transport: Transport) -> ForwardEngine:
        engine = ForwardEngine(plan, [Wide] * 4, dtype=dtype, transport=transport)
        assert engine.run(torch.ones(2, 256)) is not None or plan.mesh.size > 1
        return engine

    gc.collect()
    gc.freeze()  # nothing that was there before is looked through
    engines = run_local(plan.mesh.size, run)
    found = sum(resident_bytes().values())
    weights = 4 * 2 * (256 * 256 + 256) * dtype.itemsize
    assert weights <= found < weights * 1.02 + 2**14  # biases that tp copies, and small things
    for state in (engine.state_bytes() for engine in engines):
        assert state.gradients == state.optimizer == 0
        assert state.total == state.weights


def trained(plan: qs.Plan, folder: Path) -> Tensor:
    """Train with everything that a state can have, save it in all ways, and return what one process gives then."""

    def run(engine: Engine) -> Any:
        engine.ema(0.9)
        mine = IDS[:6].chunk(engine.num_replicas)[engine.replica]
        engine.step(mine, mine)
        state = engine.state_dict()
        save_file(state, folder / f"rank{engine.transport.rank}.safetensors", engine.state_metadata(state))
        engine.save_dcp(folder / "dcp")
        engine.save_pretrained(folder / "pretrained")
        full = engine.full_state_dict(all_blocks=True)
        return full, engine.evaluate(mine, None, outputs=True).outputs

    results = run_engines(plan, lambda: tiny_gpt(LENGTH), run, cross_entropy_sum, adam, dtype=torch.float64)
    torch.save(results[0][0], folder / "full.pt")
    return torch.cat([results[rank][1] for rank in (0, plan.mesh.size // 2)])


def test_weights_are_those_of_any_training(tmp_path: Path) -> None:
    expected = trained(qs.compile("1f1b", mesh="dp=2,tp=2", microbatches=2, zero=1), tmp_path)
    full = torch.load(tmp_path / "full.pt")
    assert any(name.startswith("optimizer.") for name in full)
    loads: list[Callable[[ForwardEngine], object]] = [
        lambda engine: engine.load_state_files(sorted(tmp_path.glob("rank*"))),
        lambda engine: engine.load_dcp(tmp_path / "dcp"),
        lambda engine: engine.load_pretrained(tmp_path / "pretrained"),
        lambda engine: engine.load_full_state_dict(full),
    ]
    for load, mesh in zip(loads, ["pp=2", "tp=2", "pp=2,tp=2", "dp=2"], strict=True):
        plan = qs.compile("inference", mesh=mesh, microbatches=2)
        require_equal(plan, run_on(plan, tiny_gpt(LENGTH), [IDS[:6]], load, seed=1), [expected])


PLAN, TRAINING = (qs.compile(name, mesh="pp=1", microbatches=1) for name in ("inference", "1f1b"))
X = torch.ones(2, 256)
NEEDS = "ForwardEngine needs one of the schedule .inference., but this plan .1f1b. is for train: Engine"
IS_FORWARD = "Engine needs a plan of a training, but this plan .inference. is for forward: ForwardEngine"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (NEEDS, lambda: ForwardEngine(TRAINING, [Wide])),
        (IS_FORWARD, lambda: Engine(PLAN, [Wide], nn.functional.mse_loss, adam)),
        ("clip is a setting of training", lambda: ForwardEngine(PLAN, [Wide], clip=1.0)),
        ("unknown key", lambda: ForwardEngine(PLAN, [Wide], sed=1)),
        ("blocks is a whole Wide", lambda: ForwardEngine(PLAN, Wide())),
        ("needs inputs", lambda: ForwardEngine(PLAN, [Wide]).run(None)),
        ("no block takes 'mask'", lambda: ForwardEngine(PLAN, [Wide]).run(X, mask=X)),
        ("no weight '0.fc3'", lambda: ForwardEngine(PLAN, [Wide]).set_weights({"0.fc3": X})),
    ],
)
def test_refused_in_one_line(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(qs.UsageError, match=words) as refused:
        call()
    assert len(str(refused.value).splitlines()) <= 2


def test_short_weights_are_rounded_as_a_training_rounds_its_masters() -> None:
    trained = Engine(TRAINING, [Wide], nn.functional.mse_loss, adam, dtype=torch.bfloat16)
    trained.step(X, X)
    state = trained.full_state_dict(all_blocks=True)
    assert state["model.0.fc1.weight"].dtype == torch.float32
    engine = ForwardEngine(PLAN, [Wide], dtype=torch.bfloat16, seed=1)
    engine.load_full_state_dict(state)
    assert torch.equal(engine.full_weights()["0.fc1.weight"], state["model.0.fc1.weight"].bfloat16())
