"""A run that goes on on another mesh, ZeRO stage or schedule is the run that did not change, optimizers included.

reference    steps 0 1 2 3 on the first mesh
moved        steps 0 1 on it, saved in each form; steps 2 3 on another, which reads what it needs of that
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_tied, moe_gpt
from quintsched.runtime.saving.index_ranges_in_full_tensors import LAYOUT, StateLayout
from quintsched.runtime.saving.saved_state import SavedPiece, SavedState
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.blocks import of_kind
from ...helpers.training import copied
from ..optim.optimizers import Shampoo, adafactor, muon
from ..toys import CLASSES, adam, difference, tiny_gpt
from ..trials import save_files
from .split_models import LENGTH, run_engines, train_on_ids

DECAY = 0.8
SPEC = DataSpec(input_shape=(LENGTH,), num_classes=CLASSES)
TIED = GPTOptions(hidden=16, depth=2, tied=True)
State = dict[str, Tensor]
Moved = tuple[State, list[float], State]
"""Full state, the losses of two steps from there on, and the full state after them."""


Floats = of_kind(nn.Identity, lambda self, ids: ids.double() / CLASSES)


def norms() -> Blocks:
    """Blocks with running statistics."""
    torch.manual_seed(0)
    normed = [nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.BatchNorm1d(LENGTH)) for _ in range(3)]
    return [Floats(), *normed, nn.Linear(LENGTH, CLASSES)]


def of_first_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(output, targets[:, 0].clamp(min=0), reduction="sum")
    return loss, torch.tensor(float(len(output)), dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """Model of a run, its optimizer and settings, and how near a run that moved has to stay."""

    blocks: Callable[[], Blocks] = lambda: tiny_gpt(LENGTH, depth=2)
    optimizer: Any = adam
    loss: Any = cross_entropy_sum
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    within: float = 1e-12


KINDS = {
    "gpt": Kind(),
    "experts": Kind(lambda: moe_gpt(SPEC, MoEGPTOptions(hidden=16, depth=2, experts=4, top_k=2))),
    "tied": Kind(lambda: gpt(SPEC, TIED), tied=gpt_tied(TIED)),
    "norms": Kind(norms, loss=of_first_tokens, settings={"clip": None}),
    "masters": Kind(settings={"dtype": torch.bfloat16}, within=float("inf")),
    "tied masters": Kind(
        lambda: gpt(SPEC, TIED), tied=gpt_tied(TIED), settings={"dtype": torch.bfloat16}, within=float("inf")
    ),
    "adafactor": Kind(optimizer=adafactor, within=1e-9),
    "muon": Kind(optimizer=muon, within=1e-9),
    "shampoo": Kind(optimizer=Shampoo, within=1e-9),
    "asgd": Kind(optimizer=torch.optim.ASGD, within=1e-9),
}


@dataclass(frozen=True)
class Run:
    """Parallel layout of a run."""

    mesh: str
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int = 4
    chunks: int = 1
    zero_split: str = "auto"

    def on_ranks(
        self, body: Callable[[Engine], Any], kind: Kind = KINDS["gpt"], *, averages: bool = True, **more: Any
    ) -> list[Any]:
        shape = {"microbatches": self.microbatches, "zero": self.zero, "chunks": self.chunks}
        pp = qs.Mesh.parse(self.mesh).axis_size("pp")
        tied = {"embedding": (0, pp - 1)} if kind.tied and pp > 1 else {}
        blocks = more.pop("blocks", None) or kind.blocks()
        settings = {"dtype": torch.float64, "bucket_mb": 0.004, "clip": 1.0, "zero_split": self.zero_split}

        def start(engine: Engine) -> Any:
            if averages:
                engine.ema(DECAY)
            return body(engine)

        plan = qs.compile(self.schedule, mesh=self.mesh, tied=tied, **shape)
        how = {"optimizer": kind.optimizer, "tied": kind.tied, **settings, **kind.settings, **more}
        return run_engines(plan, lambda: copied(blocks), start, kind.loss, **how)

    def __str__(self) -> str:
        return f"{self.mesh}-zero{self.zero}-{self.schedule}-{self.microbatches}"


def go_on(engine: Engine) -> Moved:
    return (
        engine.full_state_dict(all_blocks=True),
        train_on_ids(engine, [2, 3]),
        engine.full_state_dict(all_blocks=True),
    )


def begin(folder: Path, run: Run, kind: Kind = KINDS["gpt"]) -> Moved:
    """Save after two steps in each form, and make two steps more."""

    def body(engine: Engine) -> tuple[State, Moved]:
        train_on_ids(engine, [0, 1])
        save_files(engine, folder)
        engine.save_dcp(folder / "dcp")
        return engine.full_state_dict(), go_on(engine)

    ranks = run.on_ranks(body, kind)
    (whole, _, _), mine = ranks[0][1], {name: tensor for own, _ in ranks for name, tensor in own.items()}
    assert mine.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in mine.items())
    return ranks[0][1]


LOADS: dict[str, Callable[[Engine, Path, State], object]] = {
    "files": lambda engine, folder, state: engine.load_state_files(sorted(folder.glob("rank-*"))),
    "dcp": lambda engine, folder, state: engine.load_dcp(folder / "dcp"),
    "full state": lambda engine, folder, state: engine.load_full_state_dict(state),
}


def require_moved(folder: Path, expected: Moved, run: Run, kind: Kind) -> None:
    """Go on from each form, and require what the first run has. DCP has no averages; tied weights are one each."""
    saved, losses, ended = expected
    for form, load in LOADS.items():

        def body(engine: Engine, load: Any = load) -> Moved:
            load(engine, folder, saved)
            return go_on(engine)

        for loaded, found, end in run.on_ranks(body, kind):
            names = [name for name in saved if form != "dcp" or not name.startswith("ema.")]
            if kind.tied:
                names = [name for name in names if name.startswith("model.")]
            else:
                assert loaded.keys() == saved.keys(), form
            assert [name for name in names if not torch.equal(loaded[name], saved[name])] == [], form
            if kind.within < 1:
                assert found == pytest.approx(losses, rel=1e-12), form
                assert {n for n in names if difference(end[n], ended[n]) > kind.within} == set(), form


MOVES = [
    ("gpt", Run("pp=2"), Run("pp=4")),
    ("gpt", Run("pp=4"), Run("dp=1", microbatches=8)),
    ("gpt", Run("pp=2", schedule="interleaved-1f1b", chunks=2), Run("pp=2", schedule="zb-h1", microbatches=2)),
    ("gpt", Run("dp=1"), Run("tp=2")),
    ("gpt", Run("tp=2"), Run("dp=2", microbatches=2)),
    ("gpt", Run("dp=2", 0), Run("dp=2", 2)),
    ("gpt", Run("dp=2", 2), Run("dp=2", 3)),
    ("gpt", Run("dp=2", 2, zero_split="parameter"), Run("dp=2", 2, zero_split="element")),
    ("gpt", Run("dp=4", 1, microbatches=2), Run("pp=2,tp=2")),
    ("gpt", Run("dp=2,tp=2", 3), Run("pp=2", 0)),
    ("gpt", Run("cp=2"), Run("dp=2,cp=2", 2)),
    ("gpt", Run("pp=2", schedule="dualpipe"), Run("pp=2", schedule="zb-h1")),
    ("gpt", Run("pp=2"), Run("pp=2", schedule="dualpipe")),
    ("norms", Run("pp=2"), Run("pp=3")),
    ("experts", Run("ep=1"), Run("ep=2,tp=2", microbatches=2)),
    ("experts", Run("dp=2,ep=2", 1, microbatches=1), Run("pp=2,ep=2", microbatches=2)),
    ("tied", Run("pp=1"), Run("pp=2")),
    ("tied", Run("pp=3"), Run("tp=2")),
    ("tied masters", Run("pp=1"), Run("dp=2,pp=2", 1)),
    ("masters", Run("dp=2", 3), Run("tp=2")),
    ("adafactor", Run("tp=2"), Run("dp=2", 2)),
    ("muon", Run("dp=2", 3), Run("pp=2,tp=2")),
    ("shampoo", Run("dp=2,pp=2", 1), Run("dp=2,tp=2")),
    ("asgd", Run("dp=2", 3), Run("pp=2,tp=2")),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "first", "second"), MOVES, ids=str)
def test_a_run_goes_on_on_another_mesh(name: str, first: Run, second: Run, tmp_path: Path) -> None:
    saved = begin(tmp_path, first, KINDS[name])
    assert not any(tensor.dtype == torch.bfloat16 for tensor in saved[0].values())
    require_moved(tmp_path, saved, second, KINDS[name])


def test_no_rank_reads_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, Run("dp=2", 2))
    read: list[int] = []
    reading = SavedPiece.read_part

    def counted(piece: SavedPiece, part: Tensor) -> Tensor:
        found = reading(piece, part)
        read.append(found.untyped_storage().nbytes())
        return found

    monkeypatch.setattr(SavedPiece, "read_part", counted)
    state, *_ = Run("pp=2,tp=2").on_ranks(lambda engine: load_files(engine, tmp_path))
    total = sum(tensor.nbytes for name, tensor in state.items() if "." in name)
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
    kind = Kind(optimizer=partial(Quantised, lr=0.01))

    def body(engine: Engine, begins: bool) -> list[float]:
        if begins:
            train_on_ids(engine, [0, 1])
            save_files(engine, tmp_path)
        else:
            load_files(engine, tmp_path)
        return train_on_ids(engine, [2, 3])

    expected = Run("tp=2").on_ranks(partial(body, begins=True), kind)[0]
    for losses in Run("pp=2,tp=2").on_ranks(partial(body, begins=False), kind):
        assert losses == pytest.approx(expected, rel=1e-12)
    with pytest.raises(qs.MisfitError, match=r"'optimizer\..*block_max' is .* nobody can say which part"):
        Run("dp=1").on_ranks(partial(body, begins=False), kind)


def load_files(engine: Engine, folder: Path, count: int | None = None) -> State:
    engine.load_state_files(sorted(folder.glob("rank-*"))[:count])
    return engine.full_state_dict(all_blocks=True)


def test_another_model_or_a_part_of_one_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for mesh in ("pp=2", "tp=2"):
        (tmp_path / mesh).mkdir()
        Run(mesh).on_ranks(lambda engine, mesh=mesh: save_files(engine, tmp_path / mesh))
    for blocks, words in (
        (tiny_gpt(LENGTH, depth=3), r"of another model: '\d.*' is only on one side"),
        (tiny_gpt(4, depth=2), r"0\.positions.* is \(8, 16\), but 0\.positions\.weight needs \(4, 16\)"),
    ):
        with pytest.raises(qs.MisfitError, match=words):
            Run("tp=2").on_ranks(lambda engine: load_files(engine, tmp_path / "pp=2"), blocks=blocks)
    with pytest.raises(qs.InputError, match="files do not have all numbers of 'model"):
        Run("dp=1").on_ranks(lambda engine: load_files(engine, tmp_path / "tp=2", 1))
    with pytest.raises(qs.UsageError, match="has 1 averages of weights, the engine 0"):
        Run("tp=2").on_ranks(lambda engine: load_files(engine, tmp_path / "pp=2"), averages=False)


def test_files_of_several_saves_are_refused(tmp_path: Path) -> None:
    def save_twice(engine: Engine, folder: Path) -> None:
        for number in range(2):
            train_on_ids(engine, [number])
            save_files(engine, folder / str(number))

    for name in ("run", "other"):
        for number in range(2):
            (tmp_path / name / str(number)).mkdir(parents=True)
        Run("pp=2").on_ranks(lambda engine, name=name: save_twice(engine, tmp_path / name))
    names = ("run/0/rank-00000", "run/1/rank-00001", "other/0/rank-00001")
    one, two, three = (tmp_path / f"{name}.safetensors" for name in names)
    for other, words in (
        (two, rf"{one} is of step 1, but {two} of step 2; give the files"),
        (three, rf"{one} is of run [0-9a-f]{{16}}, but {three} of run"),
    ):
        with pytest.raises(qs.MisfitError, match=words):
            Run("pp=2").on_ranks(lambda engine, other=other: engine.load_state_files([one, other]))


def test_files_that_are_damaged_or_no_such_files_are_refused(tmp_path: Path) -> None:
    path, plain = tmp_path / "rank-00000.safetensors", StateLayout().to_text()
    for text, fault in (
        ("{", "its layout: .*not JSON"),
        ("[]", "its layout: .*/: Input should be"),
        ('{"version": 2}', "its layout: .*/version: Input should be 1"),
        (plain.replace('"tensors":{}', '"tensors":{"a":3}'), "its layout: .*list index out of range"),
        (plain.replace('"same":[]', '"odd":[]'), "its layout: .*/same: Field required"),
        (None, "not a safetensors file"),
    ):
        if text is None:
            path.write_bytes(b"no tensors")
        else:
            save_file({"model.0.weight": torch.ones(2)}, path, metadata={LAYOUT: text})
        with pytest.raises(qs.InputError, match=rf"(?s)rank-00000\.safetensors: .*{fault}"):
            SavedState.of_files([path])
    save_file({"model.0.weight": torch.ones(2)}, path)
    assert SavedState.of_files([path]).unplaced == [path]
