"""Names of the tensors of one engine's model, from its blocks, or as a checkpoint uses them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quintsched.errors import UsageError, nearest

from ...blocks.block_builders import Blocks
from ...blocks.state_dict_entries import saved_tensors
from ...stage.build_stages import Stage
from .foreign_names import TensorOrigin, gpt2_origins, is_gpt


@dataclass(frozen=True)
class ModelNames:
    """Sources for the names of a model's tensors.

    Attributes:
        outlines: all blocks, of which only names and kinds matter.
        own: our names to the model's own, where the blocks know them (`split`).
        tied: our names that are one tensor, by the name of each tie.
        config: the configuration of the library that the model is from, or None.
        conversions: that library's rules for names of checkpoints (`load_pretrained`).
        generation_config: that library's settings of generation, or None.
        adapter: PEFT's, of a model with one (`names`, `config`, `others`), or None.
        aliases: all names that the model has for a tensor, by each of them, where there are several.
        optional: the model's names of tensors that keep their values where a checkpoint lacks them.
    """

    outlines: Sequence[nn.Module]
    own: Mapping[str, str] | None
    tied: Mapping[str, Sequence[str]]
    config: Any = None
    conversions: Sequence[Any] = ()
    generation_config: Any = None
    adapter: Any = None
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    optional: Collection[str] = ()

    @classmethod
    def from_blocks(
        cls, blocks: Blocks, outlines: Sequence[nn.Module], tied: Mapping[str, Sequence[str]]
    ) -> ModelNames:
        """Return the names that blocks declare."""
        known = ("own_names", "config", "conversions", "generation_config", "adapter")
        own, config, conversions, generation_config, adapter = (getattr(blocks, name, None) for name in known)
        aliases, optional = getattr(blocks, "aliases", {}), getattr(blocks, "optional", ())
        return cls(outlines, own, tied, config, conversions or (), generation_config, adapter, aliases, optional)

    @property
    def ours(self) -> list[str]:
        """Names of all tensors that are saved, in the order of the blocks."""
        return [f"{number}.{name}" for number, block in enumerate(self.outlines) for name in saved_tensors(block)]

    def own_of(self, stages: Mapping[int, Stage]) -> dict[str, str]:
        """Return the model's own names of the trained weights of some stages, by our names."""
        own = self.own or {}
        return {name: own.get(name, name) for stage in stages.values() for name in stage.named_weights()}

    def is_gpt2(self, found: Collection[str] = ()) -> bool:
        """Whether names are GPT-2's: those of a built-in GPT, unless a checkpoint has ours."""
        return self.own is None and is_gpt(self.outlines) and not any(name in found for name in self.ours)

    def origins(self, given: Mapping[str, str] | None = None, found: Collection[str] = ()) -> dict[str, TensorOrigin]:
        """Return the origin of each tensor: as `given`, as the blocks declare, in GPT-2's names, or by our name.

        Raises `UsageError` for unknown names in `given`, `MisfitError` for a GPT of another shape than GPT-2's.
        """
        if given is not None:
            _require_known(given, self.ours)
        if given is None and self.is_gpt2(found):
            return gpt2_origins(self.outlines)
        if given is not None:
            return {name: TensorOrigin(given.get(name, name)) for name in self.ours}
        return {name: TensorOrigin(names[0], alike=names[1:]) for name in self.ours for names in [self._all_own(name)]}

    def _all_own(self, name: str) -> tuple[str, ...]:
        """Return the model's names of a tensor: first the one that it is looked up by, then all others."""
        own = (self.own or {}).get(name, name)
        return tuple(dict.fromkeys((own, *self.aliases.get(own, ()))))

    def saved_as(self, origin: TensorOrigin) -> str:
        """Return the name that a tensor is saved by: the first that the model has for it."""
        return next(iter(self.aliases.get(origin.name, ())), origin.name)

    def may_stay(self, fresh: Sequence[str]) -> list[str]:
        """Return names and patterns of tensors that may keep their values: `fresh`, and optional ones."""
        own = self.own or {}
        return [*fresh, *(name for name in self.ours if own.get(name) in self.optional)]

    def same(self) -> list[Sequence[str]]:
        """Return groups of names of one tensor: tied, under several names in a block, or a buffer of several."""
        found: dict[str, list[str]] = {}
        for name in self.ours:
            if self.own is not None and name in self.own:
                found.setdefault(self.own[name], []).append(name)
        alike = [group for group in found.values() if len(group) > 1]
        return [*self.tied.values(), *_same_within(self.outlines), *alike]

    def groups(self) -> dict[str, list[str]]:
        """Return all our names of a tensor in the whole model, by each of them."""
        same: dict[str, list[str]] = {name: [name] for name in self.ours}
        for group in self.same():
            joined = list(dict.fromkeys(name for one in group for name in same[one]))
            same.update(dict.fromkeys(joined, joined))
        return same

    def dcp_names(self) -> dict[str, tuple[str, ...]]:
        """Return all names of a tensor in DCP, by our name: the model's own where blocks declare them."""
        return {
            name: tuple(dict.fromkeys(called for other in group for called in self._all_own(other)))
            for name, group in self.groups().items()
        }


def _same_within(blocks: Sequence[nn.Module]) -> list[list[str]]:
    """Return groups of names that are one tensor within a block."""
    found: list[list[str]] = []
    for number, block in enumerate(blocks):
        groups: dict[int, list[str]] = {}
        for name, tensor in saved_tensors(block).items():
            groups.setdefault(id(tensor), []).append(f"{number}.{name}")
        found += [group for group in groups.values() if len(group) > 1]
    return found


def _require_known(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"names: the model has no tensor {name!r}{nearest(name, known)}")
