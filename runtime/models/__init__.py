"""Built-in models, by their names in a job file, as lists of blocks.

A model is a list of zero-argument builders, one per block: a rank calls those of its stages only.
Adding a model is one module with an options class and a function, and one line in MODELS.
Imports `splitting`, `parallel`, `blocks`, `data`, `autograd`, `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

from torch import nn

from quintsched.errors import UsageError, suggest
from quintsched.import_user_code import call_object, load_object, names_file
from quintsched.strategies.descriptions.model import Model

from ..blocks.block_builders import Blocks, seeded
from ..data import DataSpec
from ..settings.engine_settings import Settings, read_settings
from ..settings.job_file import ModelConfig
from ..splitting.split_whole_model import Split, split
from ..user_objects.library_or_user import arguments_of
from .gpt import GPTOptions, MoEGPTOptions, gpt, gpt_sizes, gpt_tied, moe_gpt, moe_gpt_sizes
from .vit import ViTOptions, vit, vit_sizes

Builder: TypeAlias = Callable[[], nn.Module]
TiedNames: TypeAlias = dict[str, tuple[str, ...]]
Options = TypeVar("Options", bound=Settings)


@dataclass(frozen=True)
class ModelKind(Generic[Options]):
    """A built-in model: the class of its options, and the functions that turn data and options into blocks and sizes.

    `tied` returns its tied weights, by their names in the whole model.
    """

    options: type[Options]
    build: Callable[[DataSpec, Options], list[Builder]]
    sizes: Callable[[DataSpec, Options], Model]
    tied: Callable[[Options], TiedNames] = lambda _: {}


MODELS: Mapping[str, ModelKind[Any]] = MappingProxyType(
    {
        "vit": ModelKind(ViTOptions, vit, vit_sizes),
        "gpt": ModelKind(GPTOptions, gpt, gpt_sizes, gpt_tied),
        "moe-gpt": ModelKind(MoEGPTOptions, moe_gpt, moe_gpt_sizes, gpt_tied),
    }
)


def build_model(config: ModelConfig, data: DataSpec, seed: int = 0) -> Blocks:
    """Return the blocks of a job's model.

    A user's function ("my_file.py:build") is called with the options by name, and with `data` and `pretrained` if it
    has parameters of these names. It returns a list of modules or of functions that build them, a `Split`, or a whole
    model, which is split. Its weights are drawn under `seed`, on all ranks alike.
    Raises UsageError for an unknown name or wrong options, MisfitError where the data does not fit the model.
    """
    if names_file(config.name):
        with seeded(seed, 0):
            return _user_blocks(config.name, call_object(config.name, **_user_arguments(config, data)))
    kind, options = _built_in(config)
    return kind.build(data, options)


def tied_weights(config: ModelConfig) -> TiedNames:
    """Return the tied weights of a job's model by the name of each tie; for a user's function, `model.tied`.

    Raises UsageError for an unknown name or wrong options.
    """
    if names_file(config.name) or config.tied:
        return dict(config.tied)
    kind, options = _built_in(config)
    return kind.tied(options)


def model_sizes(config: ModelConfig, data: DataSpec) -> Model:
    """Return the sizes of a job's model, for predictions.

    Raises UsageError for a user's function, whose sizes are unknown, and as `build_model` does.
    """
    if names_file(config.name):
        raise UsageError(
            f"model.name: {config.name} is a function, whose sizes no prediction knows; there is: " + ", ".join(MODELS)
        )
    kind, options = _built_in(config)
    kind.build(data, options)
    return kind.sizes(data, options)


def _built_in(config: ModelConfig) -> tuple[ModelKind[Any], Any]:
    """Return the kind of a built-in model, and its options, checked."""
    with config.naming_source("model"):
        if config.name not in MODELS:
            raise UsageError(
                f"model.name: there is no model {config.name!r}{suggest(config.name, MODELS)}; "
                "a function of yours is my_file.py:build"
            )
        kind = MODELS[config.name]
        return kind, read_settings(kind.options, config.options, "", prefix="model.options")


def _user_arguments(config: ModelConfig, data: DataSpec) -> dict[str, Any]:
    """Return the arguments of a user's function: the options, and `data` and `pretrained` where it takes them."""
    function = load_object(config.name)
    taken = arguments_of(function) if callable(function) else {}
    ours = {"data": data, "pretrained": config.pretrained}
    given = {name: value for name, value in ours.items() if name in taken} | config.options
    needed = [name for name, one in taken.items() if one.default is one.empty and "VAR" not in one.kind.name]
    if lacks := [name for name in needed if name not in given]:
        words = f"{config.name} takes {lacks[0]!r}: set model.options.{lacks[0]}"
        raise UsageError(f"{words}, or call it data where it is to get the sizes of the data")
    return given


def _user_blocks(name: str, blocks: object) -> Blocks:
    if isinstance(blocks, Split):
        return blocks
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.Sequential):
        return split(blocks)
    if not isinstance(blocks, (list, tuple, nn.Sequential)) or not all(callable(block) for block in blocks):
        raise UsageError(
            f"model.name: {name} did not return a list of modules or of functions that build them, nor a model"
        )
    return list(blocks)
