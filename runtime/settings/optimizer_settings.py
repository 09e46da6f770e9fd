"""The settings of a job's optimizer, its parameter groups, and the schedule of its learning rate.

optimizer:
  name: adamw                      # a class of torch.optim, "my_file.py:Class" or "package.module:Class"
  lr: 3e-4
  weight_decay: 0.1
  options: {amsgrad: true}         # further arguments of the class
  groups:
    - {params: "*.bias", weight_decay: 0}
    - {params: ["0.*", "1.*"], lr: 1e-5}
lr_schedule: {name: wsd, warmup_steps: 100, decay_steps: 500}
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from quintsched.errors import suggest
from quintsched.import_user_code import names_file

from .engine_settings import Names, SettingRule, Settings

OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam", "rmsprop"),
    *("rprop", "sgd"),
)
"""The classes of torch.optim by their names in small letters, without those that need a closure or sparse gradients."""

SHAPES = ("constant", "linear", "cosine", "polynomial", "exponential", "inverse_sqrt", "wsd")
"""Shapes of a learning rate's decay."""

_OWN = {"betas": ("adam", "adamw", "adamax", "nadam", "radam"), "momentum": ("sgd", "rmsprop", "muon")}
"""Settings that only some classes have; others take `options`."""

Patterns = Annotated[Names, BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


def names_code(name: str) -> bool:
    """Return whether a name is one of code: "my_file.py:name", or "package.module:name"."""
    return names_file(name) or ":" in name


def _one_of(known: Collection[str], code: str) -> AfterValidator:
    """Return a validator of names that are known, or names of code, as `code` shows them."""

    def check(name: str) -> str:
        if not names_code(name) and name not in known:
            raise ValueError(f"there is no {name!r}{suggest(name, known)}; others are written {code}")
        return name

    return AfterValidator(check)


class _WithOptions(Settings):
    """Settings with `options`, which are further arguments: none that is a setting by itself."""

    @model_validator(mode="after")
    def _options_are_no_settings(self) -> Self:
        if twice := sorted(type(self).model_fields.keys() & getattr(self, "options", {}).keys()):
            raise ValueError(f"options: {twice[0]} is a setting of its own; write {twice[0]}: … beside options")
        return self


class GroupConfig(_WithOptions):
    """Parameters with options of their own."""

    params: Patterns = Field(min_length=1)
    """Patterns on names of parameters in the whole model, such as "*.bias" or "0.*"; a parameter belongs to the first
    group that matches it."""
    lr: float | None = Field(default=None, ge=0)
    """The learning rate of the group; none: that of the optimizer. The schedule multiplies it too."""
    weight_decay: float | None = Field(default=None, ge=0)
    """The weight decay of the group; none: that of the optimizer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the group, as the class takes them."""


class OptimizerConfig(_WithOptions):
    """The optimizer."""

    name: Annotated[str, SettingRule.CODE, _one_of(OPTIMIZERS, "package.module:Class or my_file.py:Class")] = "adam"
    """A class of torch.optim in small letters (adamw, sgd, muon, adafactor, …), or another class:
    "my_file.py:Class", "package.module:Class"."""
    lr: float = Field(default=1e-3, ge=0)
    """The learning rate that the schedule's factor multiplies."""
    momentum: Annotated[float, SettingRule.GIVEN] = Field(default=0.0, ge=0)
    """Of sgd, rmsprop and muon."""
    weight_decay: Annotated[float, SettingRule.GIVEN] = Field(default=0.0, ge=0)
    """Added to the gradient (sgd, adam) or subtracted from the weights (adamw)."""
    decay: Literal["all", "matrices"] = "all"
    """The weights that decay: "all", or "matrices", which spares biases, norms, embeddings and weights tied to them,
    and those that a module names in its attribute `undecayed`."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], SettingRule.GIVEN
    ] = Field(default=(0.9, 0.999), strict=False)
    """Decay of the running means of adam and its kin."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class: {amsgrad: true}, {nesterov: true}."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Parameter groups with options of their own, by patterns on names."""

    @model_validator(mode="after")
    def _only_used_settings(self) -> OptimizerConfig:
        for setting, owners in _OWN.items():
            if setting in self.model_fields_set and self.name not in owners and not names_code(self.name):
                raise ValueError(f"{self.name!r} has no {setting}")
        if self.name == "sgd" and not self.momentum < 1:
            raise ValueError("momentum of sgd is below 1")
        return self


class LearningRateConfig(Settings):
    """The factor of the learning rate from step to step."""

    name: Annotated[str, SettingRule.CODE, _one_of(SHAPES, "my_file.py:factor")] = "constant"
    """The shape of the decay after the warm-up: constant, linear, cosine, polynomial, exponential, inverse_sqrt, wsd
    (warm-up, stable, decay), or a user's function (step, total steps) → factor: "my_file.py:factor"."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise."""
    min_factor: float = Field(default=0.0, ge=0, le=1)
    """The factor at the end."""
    power: float = Field(default=2.0, gt=0)
    """The exponent of polynomial decay."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of the linear decay at the end of wsd; none: a tenth of all steps."""
