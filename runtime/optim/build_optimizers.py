"""Optimizers of a rank: built over the whole model as in one process, then rebound to the tensors that it steps.

    user function ◀── stand-ins for all parameters: whole shapes, no memory             the same groups on every mesh
           │
       optimizers ──▶ `tensors_each_optimizer_needs` ──▶ which parameters must stay whole
           │
           └── groups with stand-ins ──▶ groups with this rank's parameters, segments, or gathered matrices

So a function may group by names, shapes or attributes of parameters, and finds all parameters, whatever stages and
shards a rank has. Where every rank holds a whole replica of the model, the function gets the real parameters.
Where it groups these otherwise than the blocks' own, it is refused (`accepted_optimizer_forms`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quintsched.errors import MisfitError, UsageError
from quintsched.ir.instruction_set import OptStep

from ..agreement.engine_settings_between_ranks import optimizer_section
from ..agreement.refuse_unequal_ranks import Section
from ..comm import Group
from ..parallel.tensor.parameter_shards import shard_of
from ..settings.allowed_setting_values import ZeroSplit
from ..stage.rank_stages import RankModel
from .accepted_optimizer_forms import Builder, holds_tensors, parameters_of, rebound
from .chained_optimizers import chained
from .step_on_gathered_matrices import GatheredMatrix, Stepper
from .tensors_each_optimizer_needs import (
    COUPLING_BY_CLASS,
    Coupling,
    coupling_of,
    hooks_of,
    kind_of,
    require_free_hooks,
    require_steppable,
)

_logger = logging.getLogger("quintsched.runtime")

StepStages = tuple[int, ...]

_WHOLE = Coupling.WITHIN | Coupling.ACROSS
"""Couplings that need whole parameters."""


MasterOf = Callable[[nn.Parameter], nn.Parameter | None]
"""Maps a parameter to the tensor that a rank steps for it; None where it has none."""


class OptimizerBuilds:
    """Builds the optimizers of one rank.

    Args:
        builder: builds optimizers from named parameters.
        model: this rank's stages, and the outlines of all blocks.
        tensor: the ranks of tp.
        split: the unit of sharding over replicas: elements or parameters.

    Attributes:
        whole: parameters of this rank's stages that are stepped whole.
        why: classes of the optimizers that need whole parameters.
        at_one_place: whether one replica steps all whole parameters.
        settings: classes of the optimizers, and their groups' options; None where this rank has none.

    Raises:
        UsageError: an optimizer that cannot be stepped, or that needs a declaration of its dependencies.
        MisfitError: an optimizer whose needs the mesh or `split` cannot meet.
    """

    def __init__(self, builder: Builder, model: RankModel, tensor: Group, split: ZeroSplit) -> None:
        self._builder, self._model, self._tensor, self._split = builder, model, tensor, split
        plan = model.plan
        self._steps: list[StepStages] = [i.stages for i in plan.programs[model.pp_rank] if isinstance(i, OptStep)]
        self._is_whole_here = plan.mesh.axis_size("pp") * plan.mesh.axis_size("ep") == 1 and len(self._steps) == 1
        self._shards = plan.zero.shards_optimizer
        self._is_direct = self._is_whole_here and not self._shards and tensor.size == 1
        self.whole: set[nn.Parameter] = set()
        self.why: list[str] = []
        self.at_one_place = False
        self.settings: Section | None = None
        self._made: dict[StepStages, list[Optimizer]] = {}
        self._coupling: list[Coupling] = []
        if not self._is_direct:
            self._names = dict(self._own_names())
            self._stand_ins = dict(self._make_stand_ins())
            self._ids = {id(stand_in): name for name, stand_in in self._stand_ins.items()}
            self._made = {step: self._build(list(self._stand_ins.items())) for step in self._steps}
            self._settle()

    def _own_names(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield this rank's parameters and the names that they are built by: for tied ones, the first name."""
        first = {other: names[0] for names in self._model.tied.names.values() for other in names[1:]}
        for stage in self._model.stages.values():
            for name, parameter in stage.named_weights().items():
                yield parameter, first.get(name, name)

    def _make_stand_ins(self) -> Iterator[tuple[str, nn.Parameter]]:
        own = {name: parameter for parameter, name in self._names.items()}
        others = {other for names in self._model.tied.names.values() for other in names[1:]}
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for number, block in enumerate(self._model.outlines):
            for name, parameter in block.named_parameters():
                if parameter.requires_grad and id(parameter) not in seen and f"{number}.{name}" not in others:
                    seen.add(id(parameter))
                    found[f"{number}.{name}"] = parameter
        for name, outline in {**found, **{name: own[name] for name in own if name not in found}}.items():
            yield name, self._stand_in(outline, own.get(name))

    def _stand_in(self, outline: nn.Parameter, own: nn.Parameter | None) -> nn.Parameter:
        """Return a parameter of a whole shape without memory, with the attributes that user code set on it."""
        dtype = self._model.options.dtype or (outline if own is None else own).dtype
        dtype = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
        made = nn.Parameter(torch.zeros((), dtype=dtype, device=self._tensor.device).expand(outline.shape))
        for given in (outline, own):
            kept = {} if given is None else vars(given)
            made.__dict__.update({name: value for name, value in kept.items() if not name.startswith("_quintsched")})
        return made

    def _build(self, named: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
        made = self._builder(named)
        for optimizer in made:
            require_steppable(optimizer)
        known = {id(parameter) for _, parameter in named}
        seen: set[int] = set()
        for optimizer in made:
            for parameter in parameters_of(optimizer):
                if id(parameter) not in known:
                    raise UsageError(
                        f"{type(optimizer).__name__} steps a parameter {tuple(parameter.shape)} that is none of those "
                        "that its function was given; build it over these: optimizer=lambda params: …(params)"
                    )
                if id(parameter) in seen:
                    raise UsageError(f"two optimizers step the same parameter, {tuple(parameter.shape)}")
                seen.add(id(parameter))
        self.settings = self.settings or optimizer_section(made)
        return made

    def _settle(self) -> None:
        """Decide which parameters must be whole, and raise where the mesh cannot keep them so."""
        whole: set[str] = set()
        for optimizer in next(iter(self._made.values()), []):
            require_free_hooks(optimizer)
            found, kind, names = coupling_of(optimizer), kind_of(optimizer), self._names_in(optimizer)
            if found is None:
                self._require_all_whole(kind, "optimizer" if hooks_of(optimizer) else kind)
            elif Coupling.NORM in found and (self._has_copies or len(names) < len(self._stand_ins)):
                self._require_all_here(kind)
                found = Coupling.ACROSS
            found = Coupling.ACROSS if found is None else found
            self._coupling.append(found)
            if found is not Coupling.NONE and self._tensor.size > 1:
                self._require_no_dtensors(kind)
            is_known = type(optimizer) in COUPLING_BY_CLASS and not hooks_of(optimizer)  # and asks for no shapes
            if found & _WHOLE or (self._split == "auto" and not is_known):
                whole.update(names)
                self.why.append(kind)
        if self._shards and self._split == "element" and self.why:
            raise MisfitError(
                f"{self.why[0]} works on whole parameters, and zero_split='element' would give it segments of them; "
                "leave zero_split out, or write zero_split='parameter'"
            )
        everything = self._split == "parameter"
        self.whole = {parameter for parameter, name in self._names.items() if everything or name in whole}

    @property
    def _has_copies(self) -> bool:
        """Whether some rank has several copies of a tied weight, on several of its stages."""
        plan = self._model.plan
        return any(len({*map(plan.layout.rank_of, held)}) < len(held) for held in plan.tied.values())

    def _require_all_whole(self, kind: str, owner: str) -> None:
        """Assign all parameters, whole, to one replica, for an optimizer with undeclared dependencies.

        `owner` names the object that the declaring attribute may be set on, in words.
        """
        if not self._is_whole_here or self._tensor.size > 1 or self._has_copies:
            raise MisfitError(
                f"{kind} does not say what its step depends on, but the ranks of mesh {self._model.plan.mesh} hold "
                f"shares of the parameters; write {owner}.needs_whole_parameters = False where it steps each number "
                f"by its own gradients, True where by its whole parameter, and {owner}.needs_gradient_norm = True "
                "where by the norm of all gradients; one that depends on all parameters otherwise trains on dp and cp "
                "alone"
            )
        self.at_one_place = True
        _logger.warning(
            "%s does not say what its step depends on: one replica steps all parameters; write "
            "%s.needs_whole_parameters = True or False to share them out",
            kind,
            owner,
        )

    def _require_all_here(self, kind: str) -> None:
        if self._is_whole_here and not self._shards:
            return
        zero = f" with ZeRO-{self._model.plan.zero.stage}" if self._shards else ""
        raise MisfitError(
            f"an update by {kind} depends on all parameters, their numbers, places or "
            f"how many there are, but the ranks of mesh {self._model.plan.mesh}{zero} hold shares of them; let the "
            "engine clip (clip=…), if it is a norm by which it clips; give groups options by name, if it goes by "
            "places: optimizer=lambda named: …; or train on dp, cp and tp alone, with zero=0"
        )

    def _require_no_dtensors(self, kind: str) -> None:
        for number, block in enumerate(self._model.outlines):
            for name, parameter in block.named_parameters():
                if isinstance(parameter, DTensor):
                    raise MisfitError(
                        f"{kind} works on whole parameters, but PyTorch has sharded {number}.{name} (DTensor); let "
                        "quintsched cut the block, or use an optimizer such as AdamW"
                    )

    def bind(self, master_of: MasterOf) -> dict[StepStages, Stepper]:
        """Return a stepper for each set of stages that steps together."""
        if self._is_direct:
            return self._bind_directly(master_of)
        found = {}
        for step, made in self._made.items():
            ours: dict[str, list[nn.Parameter]] = {}
            for parameter in (p for stage in step for p in self._model.stages[stage].named_weights().values()):
                master = master_of(parameter)
                if master is not None:
                    ours.setdefault(self._names[parameter], []).append(master)
            gathered, parts = list[GatheredMatrix](), dict[int, Optimizer]()
            for number, (optimizer, coupling) in enumerate(zip(made, self._coupling, strict=True)):
                names = [name for name in self._names_in(optimizer) if name in ours]
                if names and coupling & _WHOLE:
                    gathered += self._gather(names, ours)
                if names:
                    parts[number] = self._over(optimizer, ours, made)
            if parts:
                by_norm = any(Coupling.NORM in self._coupling[number] for number in parts)
                made_here, couplings = chained([*parts.values()]), list(map(self._coupling.__getitem__, parts))
                found[step] = Stepper(made_here, gathered, [*parts], goes_by_norm=by_norm, couplings=couplings)
        return found

    def _bind_directly(self, master_of: MasterOf) -> dict[StepStages, Stepper]:
        found = {}
        for step in self._steps:
            named = [
                (name, master)
                for stage in step
                for name, parameter in self._model.stages[stage].named_weights().items()
                if (master := master_of(parameter)) is not None
            ]
            if named:
                found[step] = Stepper(chained(self._build(named)), [])
        return found

    def _names_in(self, optimizer: Optimizer) -> list[str]:
        return [self._ids[id(parameter)] for parameter in parameters_of(optimizer)]

    def _gather(self, names: Iterable[str], ours: dict[str, list[nn.Parameter]]) -> Iterator[GatheredMatrix]:
        """Replace sharded parameters by matrices that are gathered over tp, and yield these."""
        for name in names if self._tensor.size > 1 else ():
            for number, parameter in enumerate(ours[name]):
                shard = shard_of(parameter)
                if shard is not None:
                    matrix = GatheredMatrix(parameter, shard, self._tensor)
                    ours[name][number] = matrix.full
                    yield matrix

    def _over(
        self, optimizer: Optimizer, ours: Mapping[str, Sequence[nn.Parameter]], made: Sequence[Optimizer]
    ) -> Optimizer:
        """Return an optimizer over this rank's parameters, with the same groups."""
        if not holds_tensors(optimizer) or type(optimizer) in COUPLING_BY_CLASS:
            return rebound(optimizer, {key: ours.get(name, ()) for key, name in self._ids.items()})
        again = self._builder([(name, parameter) for name, some in ours.items() for parameter in some])
        here = again[made.index(optimizer)] if len(again) == len(made) else None
        names = {id(parameter): name for name, some in ours.items() for parameter in some}
        wanted = [[self._ids[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        found = None if here is None else [[names[id(p)] for p in g["params"]] for g in here.param_groups]
        if here is None or found != [[name for name in group for _ in ours.get(name, ())] for group in wanted]:
            self._refuse_groups(type(optimizer).__name__)
        return here

    def _refuse_groups(self, kind: str) -> NoReturn:
        raise MisfitError(
            f"{kind} makes tensors when it is built, and groups what a rank holds of the parameters otherwise than "
            "whole ones; group parameters by name: optimizer=lambda named: …"
        )
