"""Built-in models: a name in a job file, and the blocks it stands for.

A model is a list of zero-argument builders, one per block: a rank calls those of its stages only.
Adding a model is one module with an options class and a function, and one line in MODELS.
Imports `parallel`, `blocks`, `data`, `autograd`, `job`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

from torch import nn

from quintsched.errors import UsageError, suggest
from quintsched.user_code import call_object, names_file

from ..blocks.blocks import Blocks
from ..data import DataSpec
from ..job.config import ModelConfig
from ..job.settings import Settings, read_settings
from .gpt import GPTOptions, gpt, gpt_tied
from .moe_gpt import MoEGPTOptions, moe_gpt
from .vit import ViTOptions, vit

Builder: TypeAlias = Callable[[], nn.Module]
TiedNames: TypeAlias = dict[str, tuple[str, ...]]
Options = TypeVar("Options", bound=Settings)


@dataclass(frozen=True)
class ModelKind(Generic[Options]):
    """A built-in model: the class of its options, and the function that turns sizes and options into blocks.

    `tied` says which of its weights are one, by their names in the whole model.
    """

    options: type[Options]
    build: Callable[[DataSpec, Options], list[Builder]]
    tied: Callable[[Options], TiedNames] = lambda _: {}

    def read(self, options: Mapping[str, Any]) -> Options:
        """Check the options of a job."""
        return read_settings(self.options, options, "job", prefix="model.options")


MODELS: Mapping[str, ModelKind[Any]] = MappingProxyType(
    {
        "vit": ModelKind(ViTOptions, vit),
        "gpt": ModelKind(GPTOptions, gpt, gpt_tied),
        "moe-gpt": ModelKind(MoEGPTOptions, moe_gpt, gpt_tied),
    }
)


def build_model(config: ModelConfig, data: DataSpec) -> Blocks:
    """Return the blocks of a job's model.

    A user's function ("my_file.py:build") is called with `data` and the options by name; it returns a list of
    modules or of functions that build them.
    Raises UsageError for an unknown name or wrong options, MisfitError where the data does not fit the model.
    """
    if names_file(config.name):
        return _user_blocks(config.name, call_object(config.name, data, **config.options))
    kind = _kind(config.name)
    return kind.build(data, kind.read(config.options))


def tied_weights(config: ModelConfig) -> TiedNames:
    """Return what a job's model ties: a name, and the weights that are one; for a user's function, `model.tied`.

    Raises UsageError for an unknown name or wrong options.
    """
    if names_file(config.name) or config.tied:
        return dict(config.tied)
    kind = _kind(config.name)
    return kind.tied(kind.read(config.options))


def _kind(name: str) -> ModelKind[Any]:
    if name not in MODELS:
        raise UsageError(f"model.name: there is no model {name!r}{suggest(name, MODELS)}")
    return MODELS[name]


def _user_blocks(name: str, blocks: object) -> Blocks:
    if not isinstance(blocks, (list, tuple, nn.Sequential)) or not all(callable(block) for block in blocks):
        raise UsageError(f"model.name: {name} did not return a list of modules or of functions that build them")
    return list(blocks)
