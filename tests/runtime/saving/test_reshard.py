"""A run that goes on on another mesh, ZeRO stage or schedule is the run that did not change, optimizers included.

reference    steps 0 1 2 3 on the first mesh
resharded    steps 0 1 on it, saved by each rank; steps 2 3 on another, which reads what it needs of these files
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_tied, moe_gpt
from quintsched.runtime.saving.saved_state import SavedPiece, SavedState
from quintsched.runtime.saving.tensor_placement import LAYOUT, StateLayout
from quintsched.runtime.train.summed_losses import cross_entropy_sum

from ..optim.optimizers import Shampoo, adafactor, muon
from ..toys import CLASSES, adam, difference, ids_task, share, tiny_gpt

LENGTH, SAMPLES, DECAY = 8, 8, 0.8


@dataclass(frozen=True)
class Run:
    """Parallel layout of a run."""

    mesh: str
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int = 4
    chunks: int = 1

    def engine(self, transport: Transport, optimizer: Any, blocks: Blocks, **more: Any) -> Engine:
        plan = qs.compile(
            self.schedule, mesh=self.mesh, microbatches=self.microbatches, zero=self.zero, chunks=self.chunks
        )
        more = {"dtype": torch.float64, "bucket_mb": 0.004, "clip": 1.0, "transport": transport} | more
        return Engine(plan, blocks, cross_entropy_sum, optimizer, **more)

    @property
    def size(self) -> int:
        return qs.Mesh.parse(self.mesh).size


def train(engine: Engine, steps: Sequence[int]) -> list[float]:
    task = ids_task(4, SAMPLES, LENGTH)
    return [engine.step(*share(engine, task.inputs[s], task.targets[s])).loss.item() for s in steps]


def save(engine: Engine, folder: Path) -> None:
    state = {name: tensor.contiguous().clone() for name, tensor in engine.state_dict().items()}
    save_file(state, path_of(folder, engine.transport.rank), metadata=engine.state_metadata())
    engine.everyone.barrier()


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


State = dict[str, Tensor]


def begin(
    folder: Path, run: Run, optimizer: Any = adam, blocks: Callable[[], Blocks] | None = None, **more: Any
) -> tuple[State, list[float], State]:
    """Save after two steps; return the full state then, the losses of two further steps, and the state after them."""

    def body(transport: Transport) -> Any:
        engine = run.engine(transport, optimizer, tiny_gpt(LENGTH, depth=2) if blocks is None else blocks(), **more)
        engine.ema(DECAY)
        train(engine, [0, 1])
        save(engine, folder)
        saved = engine.full_state_dict(all_blocks=True)
        return saved, train(engine, [2, 3]), engine.full_state_dict(all_blocks=True)

    found: tuple[State, list[float], State] = run_local(run.size, body, timeout_s=60)[0]
    return found


def go_on(
    folder: Path,
    num_files: int,
    run: Run,
    optimizer: Any = adam,
    blocks: Callable[[], Blocks] | None = None,
    **more: Any,
) -> list[tuple[State, list[float], State]]:
    def body(transport: Transport) -> Any:
        engine = run.engine(transport, optimizer, tiny_gpt(LENGTH, depth=2) if blocks is None else blocks(), **more)
        engine.ema(DECAY)
        engine.load_state_files([path_of(folder, rank) for rank in range(num_files)])
        loaded = engine.full_state_dict(all_blocks=True)
        return loaded, train(engine, [2, 3]), engine.full_state_dict(all_blocks=True)

    return run_local(run.size, body, timeout_s=60)


def require_the_same(
    expected: tuple[State, list[float], State], found: Sequence[tuple[State, list[float], State]], within: float = 1e-12
) -> None:
    saved, losses, ended = expected
    for loaded, more_losses, end in found:
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
        assert more_losses == pytest.approx(losses, rel=1e-12)
        assert end.keys() == ended.keys()
        odd = {name: difference(end[name], tensor) for name, tensor in ended.items()}
        assert max(odd.values()) <= within, odd


PAIRS = [
    (Run("pp=2"), Run("pp=4")),
    (Run("pp=4"), Run("pp=2")),
    (Run("pp=2", schedule="zb-h1"), Run("pp=2")),
    (Run("pp=2", schedule="interleaved-1f1b", chunks=2), Run("pp=2", schedule="zb-h1", microbatches=2)),
    (Run("dp=1"), Run("tp=2")),
    (Run("tp=2"), Run("dp=2", microbatches=2)),
    (Run("dp=2", microbatches=2), Run("dp=1", microbatches=8)),
    (Run("dp=2", 0), Run("dp=2", 2)),
    (Run("dp=2", 2), Run("dp=2", 3)),
    (Run("dp=2", 3), Run("dp=2", 0)),
    (Run("dp=4", 1, microbatches=2), Run("pp=2,tp=2")),
    (Run("dp=2,tp=2", 3), Run("pp=2", 0)),
    (Run("pp=2,tp=2"), Run("dp=2,tp=2", 3)),
    (Run("cp=2"), Run("cp=1")),
    (Run("cp=1"), Run("dp=2,cp=2", 2)),
    (Run("pp=2", schedule="dualpipe"), Run("pp=2", schedule="zb-h1")),
    (Run("pp=2"), Run("pp=2", schedule="dualpipe")),
]


def called(run: object) -> str:
    return f"{run.mesh}-zero{run.zero}-{run.schedule}-{run.microbatches}" if isinstance(run, Run) else str(run)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=called)
def test_a_run_goes_on_on_another_mesh(first: Run, second: Run, tmp_path: Path) -> None:
    require_the_same(begin(tmp_path, first), go_on(tmp_path, first.size, second))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("optimizer", [adafactor, muon, Shampoo, torch.optim.Adagrad, torch.optim.ASGD])
@pytest.mark.parametrize(
    ("first", "second"), [(Run("tp=2"), Run("dp=2", 2)), (Run("dp=2", 3), Run("pp=2,tp=2"))], ids=called
)
def test_whatever_an_optimizer_keeps_goes_along(first: Run, second: Run, optimizer: Any, tmp_path: Path) -> None:
    expected = begin(tmp_path, first, optimizer)
    require_the_same(expected, go_on(tmp_path, first.size, second, optimizer), within=1e-9)


def experts() -> Blocks:
    spec = DataSpec(input_shape=(LENGTH,), num_classes=CLASSES)
    return moe_gpt(spec, MoEGPTOptions(hidden=16, depth=2, experts=4, top_k=2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Run("ep=2", microbatches=2), Run("ep=1")),
        (Run("ep=1"), Run("ep=2,tp=2", microbatches=2)),
        (Run("dp=2,ep=2", 1, microbatches=1), Run("pp=2,ep=2", microbatches=2)),
    ],
    ids=called,
)
def test_experts_go_to_other_ranks(first: Run, second: Run, tmp_path: Path) -> None:
    require_the_same(begin(tmp_path, first, blocks=experts), go_on(tmp_path, first.size, second, blocks=experts))


TIED = GPTOptions(hidden=16, depth=2, tied=True)


def tied_blocks() -> Blocks:
    return gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), TIED)


@dataclass(frozen=True)
class TiedRun(Run):
    """A run of a model whose embedding is its head."""

    def engine(self, transport: Transport, optimizer: Any, blocks: Blocks, **more: Any) -> Engine:
        pp = qs.Mesh.parse(self.mesh).axis_size("pp")
        tied = {"embedding": (0, pp - 1)} if pp > 1 else {}
        plan = qs.compile("1f1b", mesh=self.mesh, microbatches=self.microbatches, zero=self.zero, tied=tied)
        more = {"dtype": torch.float64, "bucket_mb": 0.004} | more
        return Engine(plan, blocks, cross_entropy_sum, optimizer, tied=gpt_tied(TIED), transport=transport, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", [("pp=1", "pp=2"), ("pp=2", "pp=1"), ("pp=3", "tp=2")])
def test_tied_weights_are_one_weight_wherever_they_lie(pair: tuple[str, str], tmp_path: Path) -> None:
    first, second = map(TiedRun, pair)
    expected = begin(tmp_path, first, blocks=tied_blocks)
    for (_, losses, end), (_, expected_losses, ended) in (
        (found, expected) for found in go_on(tmp_path, first.size, second, blocks=tied_blocks)
    ):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        common = [name for name in ended if name in end and name.startswith("model.")]
        assert len(common) == sum(name.startswith("model.") for name in ended)
        assert max(difference(end[name], ended[name]) for name in common) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "second"), [(Run("dp=2", 3), Run("tp=2")), (Run("pp=2"), Run("dp=2", 1))])
def test_masters_keep_every_bit(first: Run, second: Run, tmp_path: Path) -> None:
    saved, _, _ = begin(tmp_path, first, dtype=torch.bfloat16)
    assert saved["model.1.attention.qkv.weight"].dtype == torch.float32
    for loaded, _, _ in go_on(tmp_path, first.size, second, dtype=torch.bfloat16):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_whole_parameters_and_segments_go_into_each_other(tmp_path: Path) -> None:
    run = Run("dp=2", 2)
    expected = begin(tmp_path, run, zero_split="parameter")
    require_the_same(expected, go_on(tmp_path, 2, run, zero_split="element"))


class Norms(list[Any]):
    """Blocks with running statistics."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = [nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.BatchNorm1d(LENGTH)) for _ in range(3)]
        super().__init__([Floats(), *width, nn.Linear(LENGTH, CLASSES)])


class Floats(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.double() / CLASSES


def test_buffers_are_part_of_it(tmp_path: Path) -> None:
    def loss_of(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(output, targets[:, 0].clamp(min=0), reduction="sum"), torch.tensor(
            float(len(output)), dtype=torch.float64
        )

    def body(transport: Transport, mesh: str, files: int) -> Any:
        plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
        engine = Engine(plan, Norms(), loss_of, adam, dtype=torch.float64, transport=transport)
        if files:
            engine.load_state_files([path_of(tmp_path, rank) for rank in range(files)])
        else:
            train(engine, [0, 1])
            save(engine, tmp_path)
        return train(engine, [2, 3]), engine.full_state_dict(all_blocks=True)

    losses, ended = run_local(2, lambda transport: body(transport, "pp=2", 0), timeout_s=60)[0]
    for found, end in run_local(3, lambda transport: body(transport, "pp=3", 2), timeout_s=60):
        assert found == pytest.approx(losses, rel=1e-12)
        assert "model.1.1.running_mean" in end
        assert max(difference(end[name], tensor) for name, tensor in ended.items()) <= 1e-12


def test_no_rank_reads_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, Run("dp=2", 2))
    read: list[int] = []
    reading = SavedPiece.read_part

    def counted(piece: SavedPiece, part: Tensor) -> Tensor:
        found = reading(piece, part)
        read.append(found.untyped_storage().nbytes())
        return found

    monkeypatch.setattr(SavedPiece, "read_part", counted)
    found = go_on(tmp_path, 2, Run("pp=2,tp=2"))
    total = sum(tensor.nbytes for name, tensor in found[0][0].items() if "." in name)
    assert len(found) == 4
    assert sum(read) < 2 * total  # what tp does not cut, two ranks hold


class Quantised(torch.optim.SGD):
    """Keeps a number for every four of a parameter, as optimizers of 8 bits do."""

    needs_whole_parameters = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["block_max"] = p.grad.flatten()[::4].clone()
        return super().step(closure)


def test_state_that_nobody_can_cut_stays_with_its_shards(tmp_path: Path) -> None:
    def quantised(parameters: Sequence[nn.Parameter]) -> Any:
        return Quantised(parameters, lr=0.01)

    expected = begin(tmp_path, Run("tp=2"), quantised)

    def body(transport: Transport) -> Any:
        engine = Run("pp=2,tp=2").engine(transport, quantised, tiny_gpt(LENGTH, depth=2))
        engine.ema(DECAY)
        engine.load_state_files([path_of(tmp_path, rank) for rank in range(2)])
        return train(engine, [2, 3])

    for losses in run_local(4, body, timeout_s=60):
        assert losses == pytest.approx(expected[1], rel=1e-12)
    with pytest.raises(MisfitError, match=r"'optimizer\..*block_max' is .* nobody can say which part"):
        go_on(tmp_path, 2, Run("dp=1"), quantised)


def test_another_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    begin(tmp_path, Run("pp=2"))
    with pytest.raises(MisfitError, match=r"of another model: '\d.*' is only on one side"):
        go_on(tmp_path, 2, Run("tp=2"), blocks=lambda: tiny_gpt(LENGTH, depth=3))
    with pytest.raises(MisfitError, match=r"0\.positions.* is \(8, 16\), but 0\.positions\.weight needs \(4, 16\)"):
        go_on(tmp_path, 2, Run("tp=2"), blocks=lambda: tiny_gpt(4, depth=2))
    begin(tmp_path, Run("tp=2"))
    with pytest.raises(InputError, match="files do not have all numbers of 'model"):
        go_on(tmp_path, 1, Run("dp=1"))


def test_files_of_several_saves_are_refused(tmp_path: Path) -> None:
    later, other = tmp_path / "later", tmp_path / "other"

    def body(transport: Transport, folder: Path, steps: Sequence[int]) -> None:
        folder.mkdir(exist_ok=True)
        engine = Run("pp=2").engine(transport, adam, tiny_gpt(LENGTH, depth=2))
        for step in steps:
            train(engine, [step])
            save(engine, folder)
            folder = later

    def load(transport: Transport, paths: Sequence[Path]) -> float:
        engine = Run("pp=2").engine(transport, adam, tiny_gpt(LENGTH, depth=2))
        engine.load_state_files(paths)
        return train(engine, [2])[0]

    later.mkdir()
    run_local(2, lambda transport: body(transport, tmp_path, [0, 1]), timeout_s=60)
    run_local(2, lambda transport: body(transport, other, [0]), timeout_s=60)
    one, two = path_of(tmp_path, 0), path_of(later, 1)
    with pytest.raises(MisfitError, match=rf"{one} is of step 1, but {two} of step 2; give the files"):
        run_local(2, lambda transport: load(transport, [one, two]), timeout_s=60)
    with pytest.raises(MisfitError, match=rf"{one} is of run [0-9a-f]{{16}}, but {path_of(other, 1)} of run"):
        run_local(2, lambda transport: load(transport, [one, path_of(other, 1)]), timeout_s=60)


def test_averages_that_the_engine_does_not_keep_are_refused(tmp_path: Path) -> None:
    begin(tmp_path, Run("pp=2"))

    def body(transport: Transport) -> None:
        engine = Run("tp=2").engine(transport, adam, tiny_gpt(LENGTH, depth=2))
        engine.load_state_files([path_of(tmp_path, rank) for rank in range(2)])

    with pytest.raises(UsageError, match="has 1 averages of weights, the engine 0"):
        run_local(2, body, timeout_s=60)


def test_a_file_says_how_its_tensors_lie(tmp_path: Path) -> None:
    begin(tmp_path, Run("dp=2,tp=2", 2))
    with SavedState.of_files([path_of(tmp_path, rank) for rank in range(4)]) as saved:
        for layout in saved.layouts:
            assert StateLayout.from_text(layout.to_text()) == layout
        assert [layout.replica for layout in saved.layouts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert saved.shape("model.1.attention.qkv.weight") == (48, 16)
        assert saved.whole("model.1.attention.qkv.weight").shape == (48, 16)
        assert "exp_avg" in saved.states["1.attention.qkv.weight"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "/: Input should be"),
        ('{"version": 2}', "/version: Input should be 1"),
        (StateLayout().to_text().replace('"tensors":{}', '"tensors":{"a":3}'), "list index out of range"),
        (StateLayout().to_text().replace('"same":[]', '"odd":[]'), "/same: Field required"),
    ],
)
def test_a_damaged_layout_is_refused_with_its_place(text: str, fault: str, tmp_path: Path) -> None:
    save_file({"model.0.weight": torch.ones(2)}, path_of(tmp_path, 0), metadata={LAYOUT: text})
    with pytest.raises(InputError, match=r"rank-00000\.safetensors: its layout: ") as refused:
        SavedState.of_files([path_of(tmp_path, 0)])
    assert fault in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path_of(tmp_path, 0).write_bytes(b"no tensors")
    with pytest.raises(InputError, match="not a safetensors file"):
        SavedState.of_files([path_of(tmp_path, 0)])
    save_file({"model.0.weight": torch.ones(2)}, path_of(tmp_path, 0))
    with SavedState.of_files([path_of(tmp_path, 0)]) as saved:
        assert saved.unplaced == [path_of(tmp_path, 0)]
