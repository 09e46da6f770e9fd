"""Costs of a model's blocks: estimated from their weights, or measured on one microbatch.

    estimate    number of weights that a token's matmuls use    no data, no memory, the same on every rank
    measure     seconds of forward and backward                 one block at a time, on the example's device

`stage.build_stages` cuts stages so that the cost of the slowest is minimal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quintsched.check_call_arguments import WHOLE_NUMBER, ArgumentKind, takes

from ..comm.clocks import settled_s
from .block_builders import BLOCKS, Blocks, accepted_extras, build_block, on_meta, split_result
from .trees import DIFFERENTIABLE, flatten, map_tensors, tensors_of


def estimate_costs(blocks: Blocks) -> list[float]:
    """Estimate each block's cost without running it: the number of weights that one token's matmuls use.

    A lookup (`nn.Embedding`) uses one row. A mixture of experts uses the experts that a token is routed to: the
    fractions in a module's `touched_parameters`. Builders run on the meta device, so nothing is allocated.
    """
    costs = []
    for block in blocks:
        module = on_meta(block)
        lookups = {id(m.weight): m.embedding_dim for m in module.modules() if isinstance(m, nn.Embedding)}
        fractions = {id(p): f for m in module.modules() for p, f in getattr(m, "touched_parameters", tuple)()}
        touched = (lookups.get(id(p), p.numel() * fractions.get(id(p), 1.0)) for p in module.parameters())
        costs.append(float(sum(touched)))
    return costs


@takes(
    "measure_costs(blocks, example)",
    blocks=BLOCKS,
    example=ArgumentKind("a tensor, or a tree of tensors", lambda example: bool(list(tensors_of(example)))),
    seed=WHOLE_NUMBER,
    rounds=WHOLE_NUMBER,
)
def measure_costs(blocks: Blocks, example: Any, seed: int = 0, rounds: int = 3) -> list[float]:
    """Measure each block's forward and backward on one microbatch, in seconds: the minimum over `rounds`.

    `example` is one microbatch of the model's input, a tensor or a tree. Blocks are built one at a time.
    """
    costs = []
    riders: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        tree, tensors = flatten(example)
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        device = tensors[0].device
        module = build_block(block, number, seed, dtype).to(device)
        accepts = accepted_extras(module)
        beside = {name: tensor for name, tensor in riders.items() if accepts(name)}
        taken = []
        for _ in range(rounds):
            start = settled_s(device)
            given = tree.build([t.detach().requires_grad_(number > 0 and t.dtype in DIFFERENTIABLE) for t in tensors])
            output, fresh, _ = split_result(module(given, **beside))
            torch.stack([t.sum() for t in tensors_of(output) if t.requires_grad]).sum().backward()
            taken.append(settled_s(device) - start)
        module.zero_grad()
        costs.append(min(taken))
        example = map_tensors(Tensor.detach, output)
        riders.update({name: tensor.detach() for name, tensor in fresh.items()})
    return costs
