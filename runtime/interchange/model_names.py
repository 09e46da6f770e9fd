"""What the tensors of one engine's model are called, as its blocks say, or as the checkpoint's names show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quintsched.errors import UsageError, nearest

from ..blocks.blocks import Blocks
from .gpt2 import gpt2_origins, is_gpt
from .names import Origin


@dataclass(frozen=True)
class ModelNames:
    """What the names of a model are found by.

    Attributes:
        outlines: all blocks, of which only names and kinds matter.
        own: our names to the model's own, where the blocks say (`split`).
        tied: names of ours that are one, by the name of each tie.
        config: the configuration of the library that the model is from, or None.
        generation_config: that library's settings of generation, or None.
    """

    outlines: Sequence[nn.Module]
    own: Mapping[str, str] | None
    tied: Mapping[str, Sequence[str]]
    config: Any = None
    generation_config: Any = None

    @classmethod
    def of(cls, blocks: Blocks, outlines: Sequence[nn.Module], tied: Mapping[str, Sequence[str]]) -> ModelNames:
        """Return what blocks say of their names."""
        said = (getattr(blocks, name, None) for name in ("own_names", "config", "generation_config"))
        own, config, generation_config = said
        return cls(outlines, own, tied, config, generation_config)

    @property
    def ours(self) -> list[str]:
        """The names of all tensors that are saved, in the order of the blocks."""
        return [f"{number}.{name}" for number, block in enumerate(self.outlines) for name in block.state_dict()]

    def is_gpt2(self, found: Collection[str] = ()) -> bool:
        """Whether names are GPT-2's: those of a built-in GPT, unless a checkpoint has ours."""
        return self.own is None and is_gpt(self.outlines) and not any(name in found for name in self.ours)

    def origins(self, given: Mapping[str, str] | None = None, found: Collection[str] = ()) -> dict[str, Origin]:
        """Return where each tensor is found: as `given`, as the blocks say, in GPT-2's names, or by our name.

        Raises `UsageError` for names given that are no tensor's, `MisfitError` for a GPT of another shape than GPT-2's.
        """
        if given is not None:
            _require_known(given, self.ours)
        if given is None and self.is_gpt2(found):
            return gpt2_origins(self.outlines)
        names = given if given is not None else self.own or {}
        return {name: Origin(names.get(name, name)) for name in self.ours}


def _require_known(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"names: the model has no tensor {name!r}{nearest(name, known)}")
