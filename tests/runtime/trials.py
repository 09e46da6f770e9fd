"""Steps of an engine on all ranks, in which a block or a loss may be refused."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ..helpers.training import call_with_share, sgd

COMPILED = ("schedule", "microbatches", "slices", "losses", "zero", "chunks", "recompute", "offload")


def ones(*shape: int, steps: int = 1, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return batches whose inputs and targets are ones."""
    return [(torch.ones(*shape, dtype=dtype), torch.ones(*shape, dtype=dtype))] * steps


def engine_of(
    transport: Transport | None, blocks: Any, loss: Any = nn.functional.mse_loss, mesh: str = "pp=2", **settings: Any
) -> Engine:
    """Return an engine of two microbatches; `settings` are the compiler's or its own."""
    asked = {name: settings.pop(name) for name in COMPILED if name in settings}
    plan = qs.compile(**{"schedule": "1f1b", "microbatches": 2} | asked, mesh=mesh)
    return Engine(plan, blocks, loss, settings.pop("optimizer", sgd), transport=transport, **settings)


def on_ranks(work: Callable[[Engine], Any], make: Any, *given: Any, mesh: str = "pp=2", **settings: Any) -> list[Any]:
    """Return what `work` gives for the engine of each rank, as of `engine_of`; blocks are made there, or copied."""

    def run(transport: Transport) -> Any:
        blocks = list(make()) if callable(make) else copy.deepcopy(list(make))
        return work(engine_of(transport, blocks, *given, mesh=mesh, **settings))

    return run_local(qs.Mesh.parse(mesh).size, run, timeout_s=60)


def step(
    make: Callable[[], Sequence[Any]] | Sequence[Any],
    batches: Sequence[Any],
    loss: Any = nn.functional.mse_loss,
    mesh: str = "pp=2",
    *,
    change: Callable[[Any, int], object] = lambda blocks, number: None,
    loss_of: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> list[list[Any]]:
    """Return of each rank the losses of its steps; in place of that of the step that is refused, why.

    Blocks are made on each rank, or copied; `change` is called before each step. What is refused changes no weight.
    """

    def run(transport: Transport) -> list[Any]:
        blocks = list(make()) if callable(make) else copy.deepcopy(list(make))
        engine = engine_of(transport, blocks, loss_of(blocks) if loss_of else loss, mesh, **settings)
        found: list[Any] = []
        for number, batch in enumerate(batches):
            change(blocks, number)
            before = engine.full_weights()
            try:
                found.append(call_with_share(engine, engine.step, batch).loss.item())
            except qs.MisfitError as error:
                after = engine.full_weights()
                assert all(torch.equal(after[name], weight) for name, weight in before.items())
                return [*found, str(error)]
        return found

    return run_local(qs.Mesh.parse(mesh).size, run)


def refused(make: Any, batches: Sequence[Any], *given: Any, **more: Any) -> str:
    """Return why all ranks refuse the last of these steps, in the same words."""
    ranks = step(make, batches, *given, **more)
    assert all(len(losses) == len(batches) and isinstance(losses[-1], str) for losses in ranks), ranks
    (said,) = {losses[-1] for losses in ranks}
    return said  # type: ignore[no-any-return]


def taken(make: Any, batches: Sequence[Any], *given: Any, **more: Any) -> list[float]:
    """Return the losses of all these steps, none of which is refused."""
    ranks = step(make, batches, *given, **more)
    assert all(isinstance(loss, float) for losses in ranks for loss in losses), ranks
    return ranks[0]


def require_verdict(said: str, *given: Any, **more: Any) -> None:
    """Require that all ranks refuse the last of these steps, in words that match; without words, that all are taken."""
    if said:
        assert re.search(said, refused(*given, **more))
    else:
        taken(*given, **more)


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Require the same names, types and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        mine, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(mine, theirs), name


def save_files(engine: Engine, folder: Path) -> None:
    """Save the state of each rank in a file of its own, and wait for all of them."""
    path = folder / f"rank-{engine.transport.rank:05d}.safetensors"
    state = {name: tensor.contiguous() for name, tensor in copied(engine.state_dict()).items()}
    save_file(state, path, metadata=engine.state_metadata())
    engine.everyone.barrier()


def require_resumable(
    make: Callable[[], Engine], train: Callable[[Engine, range], None], first: range, second: range, path: Path
) -> None:
    """Require the bits of an unbroken run of engines that load what one has saved in between, in each form."""
    engine = make()
    train(engine, first)
    save_file(engine.state_dict(), path / "file", metadata=engine.state_metadata())
    full = engine.full_state_dict()
    engine.save_dcp(path / "dcp")
    train(engine, second)
    loads: list[Callable[[Engine], object]] = [
        lambda one: one.load_state_dict(load_file(path / "file")),
        lambda one: one.load_state_files([path / "file"]),
        lambda one: one.load_full_state_dict(full),
        lambda one: one.load_dcp(path / "dcp"),
    ]
    for load in loads:
        again = make()
        load(again)
        train(again, second)
        require_same(again.state_dict(), engine.state_dict())
