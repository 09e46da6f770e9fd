"""Blocks that know what a library calls their tensors, batches for them, engines that save and load, and commands."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints
from quintsched.runtime.saving.offline import __main__ as offline

from ...helpers import training
from ..parallel.cut_proofs.odd_blocks import WIDTH, Fused
from ..toys import adam, ids_task

LENGTH = 8
State = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Fused()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x * self.scale * self.frozen + self.fc2(torch.relu(self.fc1(x)))


class Split(list[nn.Module]):
    """Blocks that know what a library calls their tensors."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__([nn.Linear(8, WIDTH), *(Layer() for _ in range(3)), nn.Linear(WIDTH, 4)])
        for number, block in enumerate(self):
            block.to(torch.float64)
            random = torch.Generator().manual_seed(number)
            for tensor in block.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=random, dtype=torch.float64) / 4)
        self.config = {"model_type": "toy"}
        self.own_names: Mapping[str, str] = {
            f"{number}.{name}": prefix + self._own(number, name)
            for number, block in enumerate(self)
            for name in block.state_dict()
        }

    def _own(self, number: int, name: str) -> str:
        return {0: f"embed.{name}", len(self) - 1: f"head.{name}"}.get(number, f"layers.{number - 1}.{name}")


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return (output.flatten(1).mean(1) - targets).square().sum()


def train(engine: Engine, steps: Iterable[int] = (0, 1)) -> list[float]:
    """Train on these of the batches below; return the losses."""
    return [training.call_with_share(engine, engine.step, whole_batches(6)[step]).loss.item() for step in steps]


def train_on_ids(engine: Engine, steps: Iterable[int]) -> list[float]:
    """Train on these batches of token ids; return the losses."""
    batches = ids_task(4, 8, LENGTH).batches
    return [training.call_with_share(engine, engine.step, batches[step]).loss.item() for step in steps]


def whole_batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(9)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, dtype=torch.float64)

    return [(draw(8, 5, 8), draw(8)) for _ in range(steps)]


def plan_of(mesh: str, zero: int) -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)


def run_engines(
    plan: qs.Plan, blocks: Callable[[], Any], body: Callable[[Engine], Any], loss: Any = loss_of, **more: Any
) -> list[Any]:
    """Call with an engine on each rank."""
    return training.run_engines(plan, blocks, body, loss, **{"prove": "none", "optimizer": adam} | more)


def save_state(engine: Engine, folder: Path | str, step: int, progress: Mapping[str, Any], **how: Any) -> State:
    """Save a checkpoint, and return the state that is in it."""
    with Checkpoints(folder, 2, **how).opened(engine.saves, "resume") as saves:
        saves.save_step(step, progress)
    return engine.full_state_dict(all_blocks=True)


def load_newest(engine: Engine, folder: Path | str, **how: Any) -> int:
    """Load the newest checkpoint, and return its step."""
    with Checkpoints(folder, 2, **how).opened(engine.saves, "resume") as saves:
        found = saves.newest_whole()
        found.load_step()
        return found.step


def load_state(engine: Engine, folder: Path) -> State:
    """Load the newest checkpoint, and return the state after it."""
    load_newest(engine, folder)
    return engine.full_state_dict(all_blocks=True)


def weights_of(state: State) -> State:
    """Return the weights of a state, under their own names."""
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}


def run_command(command: str, path: object, **given: Any) -> int:
    """Run a command on a checkpoint in this process, with its flags by name; return its exit code."""
    return offline.main([command, json.dumps({"path": path, **given}, default=str)])
