"""Adapter for models of transformers: inputs of their forward, the part of the output that counts, and losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError, UsageError

from ...blocks.sum_of_means import SumOfMeans
from ...user_objects.library_or_user import arguments_of

LENGTH, SAMPLES, CHOICES, IMAGE, SOUND = 8, 2, 3, 64, 2000
"""Sizes of example inputs: tokens, samples, choices; image and sound sizes where the configuration has none."""

OUTPUT_NAMES = ("logits", "prediction_logits", "text_embeds", "image_embeds", "last_hidden_state")
"""Output that the last block returns: the first of these that is present."""

PAIRED = {"next_sentence_label": "seq_relationship_logits", "sentence_order_label": "sop_logits"}
"""Output that the last block returns beside `prediction_logits`, by the labels of its own mean in the loss."""

IGNORED = -100
"""Label that is left out of the loss."""


def is_one(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    library = sys.modules.get("transformers")
    try:
        return library is not None and isinstance(model, library.PreTrainedModel)
    except ImportError:  # its own import fails, as beside a torchvision of another torch: then no model is one of it
        return False


def settings(model: Any) -> dict[str, Any]:
    """Return keyword arguments that a forward needs besides its inputs: no cache."""
    config = model.config
    return {"use_cache": False} if hasattr(config, "use_cache") and not config.is_encoder_decoder else {}


def unpacked(model: Any, called: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what to pass beside `position_ids`, so that the model reads them as it would in plain use.

    Without cache and mask, transformers takes positions that restart for several sequences packed in a row. A model
    that keeps a cache does not; a mask of ones prevents it here, where no cache is kept.
    """
    if called.get("position_ids") is None or called.get("attention_mask") is not None or reads_packed(model):
        return {}
    ids = called[model.main_input_name]
    return {"attention_mask": ids.new_ones(ids.shape[:2], dtype=torch.long)}


def reads_packed(model: Any) -> bool:
    """Whether a model may take positions that restart for packed sequences, as without a cache, or a mask."""
    keeps_cache = settings(model) and model.config.use_cache
    return not keeps_cache or "attention_mask" not in arguments_of(model.forward)


def pools(model: Any) -> bool:
    """Whether a model of sequences returns one output per sequence."""
    return type(model).__name__.endswith("ForSequenceClassification")


def require_whole_loss(model: Any) -> None:
    """Raise `MisfitError` for training behaviour that blocks do not reproduce (layer drop)."""
    config = model.config
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            raise MisfitError(f"{name} leaves out layers at random, which blocks cannot; set config.{name} = 0.0")


def example(model: Any, *, longer: bool = False) -> dict[str, Tensor]:
    """Return small random inputs of a model, by name; raises `UsageError` where its kind is not known.

    `longer` ones are of other sizes where sizes are free, and padded where the model takes a mask.
    """
    generator = torch.Generator().manual_seed(int(longer))
    config, name, samples = model.config, model.main_input_name, SAMPLES + longer
    text, length = config.get_text_config(), LENGTH + 5 * longer
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    choices = (CHOICES,) if type(model).__name__.endswith("ForMultipleChoice") else ()

    def ids(tokens: int) -> Tensor:
        shape = (samples, *choices, tokens)
        return torch.randint(min(3, text.vocab_size - 1), text.vocab_size, shape, generator=generator)

    if name == "input_ids":
        inputs = {name: ids(length)}
    elif name == "pixel_values":
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        inputs = {name: torch.randn(samples, config.num_channels, height, width, generator=generator, dtype=dtype)}
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        shape = (samples, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {name: torch.randn(shape, generator=generator, dtype=dtype)}
    elif name == "input_values":
        inputs = {name: torch.randn(samples, SOUND + 400 * longer, generator=generator, dtype=dtype)}
    else:
        raise UsageError(
            f"{type(model).__name__} takes {name!r}; give it an example of its inputs: split(model, example={{…}})"
        )
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids(length - 2)
    if longer and name == "input_ids" and "attention_mask" in arguments_of(model.forward):
        tokens = torch.arange(length, length - samples, -1).view(-1, *[1 for _ in choices], 1)
        inputs["attention_mask"] = (torch.arange(length) < tokens).long().expand(samples, *choices, -1)
    return inputs


def select(output: Any) -> Any:
    """Return the relevant part of a model's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        several = {
            name: output[name] for name in ("prediction_logits", *PAIRED.values()) if output.get(name) is not None
        }
        if len(several) > 1:
            return several
        return next((output[name] for name in OUTPUT_NAMES if output.get(name) is not None), output)
    return output[0] if isinstance(output, tuple) else output


def loss_of(model: Any) -> Callable[..., Any] | None:
    """Return the loss of a model's head, as (sum, weight); None where none is known."""
    name = type(model).__name__
    paired = next((label for label in PAIRED if label in arguments_of(model.forward)), None)
    if paired is not None and name.endswith("ForPreTraining"):
        return pretraining_loss(paired)
    return next((make(model) for ends, make in _LOSSES.items() if name.endswith(ends)), None)


def _loss_of_classes(model: Any) -> Callable[..., Any]:
    by_default = "regression" if getattr(model.config, "num_labels", 2) == 1 else "single_label_classification"
    kind = getattr(model.config, "problem_type", None) or by_default
    return {"regression": regression_loss, "multi_label_classification": multi_label_loss}.get(kind, token_loss)


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels (…) under logits (…, classes), without labels of -100; summed, and their number."""
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def pretraining_loss(paired: str) -> SumOfMeans:
    """Return the loss of masked tokens and of pairs: targets {"labels": …, `paired`: …}, or the labels alone."""

    def labels_of(targets: Any) -> Tensor:
        return targets if isinstance(targets, Tensor) else targets["labels"]

    def of_tokens(output: Any, targets: Any) -> Tensor:
        return token_loss(output["prediction_logits"], labels_of(targets))[0]

    def of_pairs(output: Any, targets: Any) -> Tensor:
        logits = output[PAIRED[paired]]
        return logits.sum() * 0 if isinstance(targets, Tensor) else token_loss(logits, targets[paired])[0]

    def num_pairs(targets: Any) -> Tensor | int:
        return 0 if isinstance(targets, Tensor) else (targets[paired] != IGNORED).sum()

    return SumOfMeans((of_tokens, lambda targets: (labels_of(targets) != IGNORED).sum()), (of_pairs, num_pairs))


class CausalLMLoss:
    """Cross-entropy of next tokens: labels are the ids, and those of -100 are left out.

    Where sequences are cut into slices, the engine shifts whole ones first (`prepare`), and `prepared` is the loss.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of (samples, tokens, ids) logits, summed, and the number of labels."""
        return token_loss(logits[:, :-1], labels[:, 1:])

    def prepare(self, labels: Tensor) -> Tensor:
        """Return the next token of each token; the last one has none."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def prepared(self, logits: Tensor, successors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss where labels are next tokens already."""
        return token_loss(logits, successors)


def regression_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Squared error, summed over the samples."""
    return F.mse_loss(logits.flatten(1).squeeze(1), labels.to(logits.dtype), reduction="sum"), labels.numel()


def multi_label_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Binary cross-entropy of each class, summed."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum"), labels.numel()


_LOSSES: Mapping[tuple[str, ...], Callable[[Any], Callable[..., Any]]] = {
    ("ForCausalLM", "LMHeadModel"): lambda model: CausalLMLoss(),
    ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"): lambda model: token_loss,
    ("ForPreTraining", "MTModel"): lambda model: token_loss,
    ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice"): _loss_of_classes,
}
"""Losses of models, by suffixes of their class names."""


def conversions(model: nn.Module) -> tuple[Any, ...]:
    """Return the library's rules that rename tensors of checkpoints as it loads them; none in older versions."""
    try:
        rules_of = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except (ImportError, AttributeError):
        return ()
    return tuple(rules_of(model))
