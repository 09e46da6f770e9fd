"""Faults of a user's blocks, losses or batches are reported in one line, the same on all ranks, with the place."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ...helpers.blocks import of_kind

SIZE, X, Y = 4, torch.ones(4, 4), torch.ones(4, 4)

linear = partial(nn.Linear, SIZE, SIZE)
OPAQUE = object()


def run(blocks: Any, *, pp: int = 2, loss_fn: Any = nn.functional.mse_loss, inputs: Any = X, **more: Any) -> list[str]:
    """Take a step; return what each rank says."""
    plan, said = qs.compile("1f1b", mesh=f"pp={pp}", microbatches=2), dict[int, str]()

    def step(transport: Transport) -> None:
        sgd = partial(torch.optim.SGD, lr=0.1)
        extras = more if transport.rank or "only" not in more else {}
        try:
            Engine(plan, blocks, loss_fn, sgd, transport=transport).step(inputs, Y, **extras)
        except Exception as error:
            said[transport.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises((qs.MisfitError, qs.UsageError)):
        run_local(pp, step, timeout_s=20)
    return [said[rank] for rank in sorted(said)]


class Gives(nn.Module):
    """Gives what a function makes of the output of a layer."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(SIZE, SIZE), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.layer(x))


takes = partial(of_kind(nn.Linear, lambda self, x, mask: nn.Linear.forward(self, x * mask)), SIZE, SIZE)
takes_y = partial(of_kind(Gives, lambda self, given: Gives.forward(self, given["y"])), lambda y: y)
caches = partial(Gives, lambda y: {"y": y, "cache": OPAQUE})


def fails(x: Tensor) -> Tensor:
    raise KeyError("no such head")


def test_an_error_of_a_block_names_the_module_that_raised_it() -> None:
    while_tracing = run([linear, lambda: nn.Sequential(Gives(fails))])
    assert len(set(while_tracing)) == 1, "all ranks say the same"
    assert "in block 1 (Sequential), in its '0', a Gives" in while_tracing[0]
    in_step = run([linear, lambda: nn.Sequential(Gives(lambda x: x if x.is_meta else fails(x)))])
    said = "rank 1 (pp=1), stage 1, block 1 (Sequential), in its '0', a Gives: KeyError: 'no such head'"
    assert any(said in one for one in in_step)


@pytest.mark.parametrize(
    ("blocks", "more", "words"),
    [
        ([linear, 3], {}, "UsageError: block 1 is a int; it must be a module, or a function that builds one"),
        (nn.Bilinear(2, 2, 2), {}, "UsageError: blocks is a whole Bilinear; give a list of its blocks, or cut it"),
        (7, {}, "UsageError: blocks is a int; give a list of modules"),
        ([linear, lambda: 3], {}, "is to build a block, and returned a int"),
        ([linear, lambda: nn.Linear("a", 2)], {}, "is to build a block, without arguments, and raised TypeError"),
        ([linear, linear], {"loss_fn": "mse"}, "UsageError: loss_fn is a str; it must be a function"),
        ([linear, linear], {"mask": X}, "UsageError: no block takes 'mask', which the step is given"),
        ([linear, takes], {}, "block 1 (Linear) needs 'mask', which no block sends along and the step is not given"),
        ([linear, takes], {"mask": None}, "(in block 1 (Linear), mask=None;"),
        ([linear, takes], {"mask": object()}, "mask is a builtins.object; known are tensors, tuples"),
        ([linear, partial(Gives, lambda y: None)], {}, "block 1 (Gives) returns None, in which there is no tensor"),
        ([partial(Gives, lambda y: [1, 2]), linear], {}, "block 0 (Gives) returns list(1, 2), in which there is no"),
        ([partial(Gives, lambda y: (y, y)), linear], {}, "block 1 cannot take tuple(tensor, tensor)"),
        ([partial(Gives, lambda y: (y, 1.0)), linear], {}, "block 1 cannot take tuple(tensor, 1.0)"),
        ([linear, partial(Gives, lambda y: (y, y.sum(1)))], {}, "the loss function raised"),
        ([linear, linear], {"inputs": {"a": X, "b": X[:2]}}, "inputs['a'] has 4, inputs['b'] has 2"),
        ([linear, linear], {"inputs": [X, object()]}, "inputs[1] is a builtins.object"),
        ([caches, takes_y], {}, "block 0 leaves a builtins.object at ['cache'], which cannot go to another stage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_in_a_line(blocks: Any, more: dict[str, Any], words: str) -> None:
    said = run(blocks, **more)
    assert any(words in one for one in said), said


def test_a_tree_that_is_built_otherwise_than_agreed_goes_no_further() -> None:
    def output(y: Tensor) -> Any:
        return {"y": y} if y.is_meta else {"z": y}

    said = run([partial(Gives, output), takes_y])
    assert any("a Gives gave dict(z: tensor); the ranks agreed on dict(y: tensor)" in one for one in said)
