"""Families of models for the matrix: a tiny model with random weights, and batches for it.

Family("llama", "causal", build, words)
    build()          ─▶ the library's own module, on the CPU, drawn by torch's global generator
    words(random)    ─▶ inputs and targets of one batch, samples first
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

SAMPLES, LENGTH, VOCABULARY, CLASSES, WIDTH = 8, 8, 48, 10, 32

Library = Literal["transformers", "timm"]
Inputs = Tensor | dict[str, Tensor]
"""Inputs of a model's `forward`: the one tensor that it needs, or several by name."""


@dataclass(frozen=True)
class Batch:
    """Batch of a step: the tensors that the model's `forward` takes, and the targets of its loss."""

    inputs: Inputs
    targets: Tensor


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    library: Library
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    causal: bool = False
    """Whether each token sees only those before it: then sequences can be cut over cp."""


def words(random: torch.Generator) -> Batch:
    """A batch of ids, with an id as target of each; some targets do not count."""
    return Batch(_ids(random), _labels(random))


def padded_words(random: torch.Generator) -> Batch:
    """The same with sequences of different lengths, which a mask says."""
    batch = words(random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    inputs = {"input_ids": batch.inputs, "attention_mask": mask}
    return Batch(inputs, batch.targets.masked_fill(mask == 0, -100))


def translated_words(random: torch.Generator) -> Batch:
    """Ids for an encoder, others for its decoder, with an id as target of each of these."""
    return Batch({"input_ids": _ids(random), "decoder_input_ids": _ids(random)}, _labels(random))


def spoken_words(random: torch.Generator) -> Batch:
    """Sound as a spectrum of 16 bands for an encoder, ids for its decoder."""
    sound = torch.randn(SAMPLES, 16, 2 * LENGTH, generator=random, dtype=torch.float64)
    return Batch({"input_features": sound, "decoder_input_ids": _ids(random)}, _labels(random))


def embedded_words(random: torch.Generator) -> Batch:
    """Ids, with a vector as target of each sample."""
    return Batch(_ids(random), torch.randn(SAMPLES, WIDTH, generator=random, dtype=torch.float64))


def pictures(size: int, samples: int = SAMPLES) -> Callable[[torch.Generator], Batch]:
    """Return what makes a batch of square pictures, each of a class."""

    def make(random: torch.Generator) -> Batch:
        pixels = torch.randn(samples, 3, size, size, generator=random, dtype=torch.float64)
        return Batch(pixels, torch.randint(0, CLASSES, (samples,), generator=random))

    return make


def _ids(random: torch.Generator) -> Tensor:
    """Ids beyond those that libraries use for padding."""
    return torch.randint(4, VOCABULARY, (SAMPLES, LENGTH), generator=random)


def _labels(random: torch.Generator) -> Tensor:
    labels = _ids(random)
    return labels.masked_fill(torch.rand(labels.shape, generator=random) < 0.1, -100)


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model in float64, with weights drawn such that none hides what others do: nothing is zero or equal.

    They are numbers that bf16 has.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.dim() < 2:
                    parameter += 0.1 * noise
                else:
                    parameter.copy_(noise / max(1.0, parameter[0].numel() ** 0.5))
                parameter.copy_(parameter.bfloat16())
    return model


def output_of(result: Any) -> Tensor:
    """Return what the loss is found from: the scores, or the vectors, of whatever the library wraps them in."""
    for name in ("logits", "text_embeds", "pooler_output", "last_hidden_state"):
        found = getattr(result, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(result, Tensor):
        return result
    assert isinstance(result, tuple), type(result)
    return output_of(result[0])


def loss_of(result: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss added up over what counts, and how much that is: classes of ids, or squares of vectors."""
    output = output_of(result)
    if targets.is_floating_point():
        return (output - targets.to(output.dtype)).square().sum(), output.new_tensor(float(targets.numel()))
    exact = torch.promote_types(output.dtype, torch.float32)
    rows, wanted = output.to(exact).flatten(0, -2), targets.flatten()
    summed = nn.functional.cross_entropy(rows, wanted, ignore_index=-100, reduction="sum")
    return summed, (wanted != -100).sum().to(exact)
