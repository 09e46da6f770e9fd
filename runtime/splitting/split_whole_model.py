"""Split of a whole model into blocks that an engine takes: `split(model)`.

model ─▶ names of its layers ─▶ frame ─▶ flow ─▶ spans      [ prologue │ layer 0 │ layer 1 │ … │ epilogue ]
      ─▶ blocks, ties taken apart ─▶ proved: the chain of blocks computes what the model computes

A model without an example is traced if possible (`split_by_torch_fx`); so is one in whose walk no blocks are found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quintsched.check_call_arguments import MAPPING, SEVERAL, TEXT, ArgumentKind, instance, items, takes
from quintsched.errors import MisfitError, UsageError, counted

from ..blocks.block_builders import BLOCKS, BlockOrBuilder
from ..blocks.state_dict_entries import require_sized, saved_tensors
from ..comm.random_generators import GENERATORS, draws_undone
from ..parallel.tensor.cut_rules import CutRules
from ..user_objects.changes_since_split import Copies
from ..user_objects.library_or_user import arguments_of, is_of_library
from ..user_objects.object_contents import is_hooked
from ..user_objects.outer_state_reads import FINAL_ERRORS
from ..user_objects.snapshot import Snapshot, require_undone
from .adapters import peft_adapters, router_losses, transformers_inputs_and_losses
from .adapters.torchvision_operators import declare_missing
from .find_layers import apart, find_layers, in_words, named_layers, untie
from .find_values_for_later_layers import explore
from .layer_and_segment_blocks import TARGET_NAMES, layer_block, segment
from .layer_dataflow import Flow
from .materialize_blocks import built_without_weights, materialised
from .shared_forward_context import Origin
from .split_by_torch_fx import segments
from .split_proof import require_equal, require_equal_loss
from .thread_safe_fx_tracer import Untraceable
from .weightless_model import ModelFrame

declare_missing()  # before a script or a job's file imports a library of models

NOT_INPUTS = frozenset(
    {*TARGET_NAMES, "past_key_values", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"logits_to_keep", "num_logits_to_keep", "return_loss", "cache_position", "inputs_embeds", "kwargs", "args"}
)
"""Parameters of a forward that say how to run, or are for the loss."""


class Split(Sequence[BlockOrBuilder]):
    """Blocks of a model, for `Engine(plan, split(model), …)`.

    Attributes:
        tied: name → tied weights, each as "<block>.<name in the block>".
        rules: layers that tensor parallelism cuts, as for `Engine`.
        own_names: names of weights and of saved buffers, "<block>.<name in the block>", to those in the model.
        aliases: all names that the model has for a tensor, by each of them, where there are several.
        optional: the model's names of saved tensors that no layer has: a checkpoint may lack them, and they stay then.
        config: that of the model, where its library has one.
        conversions: the rules by which the model's library changes names of checkpoints as it loads them.
        generation_config: the settings of generation that the library saves beside the weights, or None.
        adapter: that of PEFT, of a model with one: all that is saved of it for other programs.
        loss_fn: the loss of the model's head: (output, targets) → (sum, weight); None: not known.
        cuts: the names of the modules of the model that are in each block.
        copies: keep copies of the model's modules equal to these.
        changing: objects that a forward of the whole model changed: numbers of blocks, and names there.
    """

    @takes("Split(blocks, tied={…})", blocks=BLOCKS, tied=MAPPING, rules=MAPPING, own_names=MAPPING)
    def __init__(
        self,
        blocks: Sequence[BlockOrBuilder],
        *,
        tied: Mapping[str, Sequence[str]] | None = None,
        rules: CutRules | None = None,
        own_names: Mapping[str, str] | None = None,
        config: Any = None,
        conversions: Sequence[Any] = (),
        generation_config: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        self._blocks = list(blocks)
        self.tied = {name: tuple(weights) for name, weights in (tied or {}).items()}
        self.rules = dict(rules or {})
        self.own_names = dict(own_names or {})
        self.aliases, self.optional = dict(aliases or {}), frozenset(optional)
        self.config, self.loss_fn = config, loss_fn
        self.adapter: peft_adapters.Adapter | None = None
        self.changing: frozenset[tuple[int, str]] = frozenset()
        self.copies: Sequence[Copies] = ()
        self.conversions, self.generation_config = tuple(conversions), generation_config

    def __repr__(self) -> str:
        return f"Split({counted(len(self), 'block')}: {in_words(self)})"

    def of(self, blocks: Sequence[BlockOrBuilder]) -> Split:
        """Return the same split with other blocks, which have the same weights by the same names."""
        other = copy.copy(self)
        other._blocks = list(blocks)
        return other

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: Any) -> Any:
        return self._blocks[number]

    def __iter__(self) -> Iterator[BlockOrBuilder]:
        return iter(self._blocks)


@takes(
    'split(from_pretrained("gpt2"))',
    model=ArgumentKind("the model, or a function that builds it", callable),
    blocks=items("a list of names", TEXT, SEVERAL),
    example=instance("a tensor, or inputs by name", Tensor, Mapping),
)
def split(
    model: nn.Module | Callable[[], nn.Module],
    *,
    blocks: Sequence[str] | None = None,
    example: Tensor | Mapping[str, Any] | None = None,
    prove: bool = True,
) -> Split:
    """Split a whole model into blocks: the code before its layers, each layer, and the code after them.

    Args:
        model: an `nn.Sequential`, a model of transformers, one whose forward can be traced (timm's, for example), or
            any module whose forward calls a list of layers one after the other. For a function that builds one of the
            last two kinds, no rank holds the model whole: each initializes the weights of its own blocks, under the
            engine's seed, by the model's own code.
        blocks: the names of the modules that are blocks, in the order in which they are called, patterns among them
            (["embed", "layers.*", "norm", "head"]); None: the entries of its lists of modules.
        example: small inputs of two samples or more for the forward: a tensor, or a mapping by name. Models of
            transformers need none; a model that can be traced needs none, or is traced where a walk finds no
            blocks.
        prove: whether the model and the chain of its blocks run once on these inputs, to be compared; afterwards the
            model, its buffers and the global generators are as before.

    Raises:
        UsageError: there are no such modules, or no layers, or no inputs.
        MisfitError: the model cannot be split so, or its blocks compute other numbers.
    """
    with GENERATORS, draws_undone():  # ranks that are threads of one process split one after the other
        if isinstance(model, nn.Module):
            found = _whole(peft_adapters.without_wrapper(model), blocks, example, prove)
            found.adapter = peft_adapters.adapter_of(model)
            return found
        return _built(model, blocks, example, prove)


def _whole(
    model: nn.Module, blocks: Sequence[str] | None, example: Tensor | Mapping[str, Any] | None, prove: bool
) -> Split:
    """Split a model that has its weights."""
    require_sized(model, f"the model ({type(model).__name__})")
    if not is_of_library(type(model)):
        require_undone(Snapshot({"model": model}, numbers=False), "its forward")
    if blocks is None and _is_row(model):
        return _sequential(model)
    untraced = ""
    if blocks is None and example is None and not transformers_inputs_and_losses.is_one(model):
        try:
            return _traced(model, segments(model))
        except Untraceable as error:
            if not any(model.children()):
                words = "is one layer, with nothing to split; pass it as a block: Engine(plan, [model], …)"
                raise UsageError(f"{type(model).__name__} {words}") from None
            untraced = f"{_untraced(model, error)}; "
    if transformers_inputs_and_losses.is_one(model):
        transformers_inputs_and_losses.require_whole_loss(model)
    inputs = _example(model, example, untraced)
    try:
        return _walked(model, blocks, inputs, prove, longer=example is None)
    except (MisfitError, UsageError) as error:
        if blocks is not None or transformers_inputs_and_losses.is_one(model) or isinstance(error, FINAL_ERRORS):
            raise
        try:
            return _proved_trace(model, inputs)
        except FINAL_ERRORS:
            raise
        except (MisfitError, Untraceable) as other:
            if isinstance(error, UsageError):  # no layers: tracing was the way to find blocks
                raise UsageError(f"{_untraced(model, other)}; and {error}") from error
            raise MisfitError(f"{error}; {_untraced(model, other)}") from error


def _untraced(model: nn.Module, error: Exception) -> str:
    proved = isinstance(error, MisfitError)
    return str(error) if proved else f"the forward of {type(model).__name__} cannot be traced: {error}"


def _walked(
    model: nn.Module, blocks: Sequence[str] | None, inputs: Mapping[str, Any], prove: bool, *, longer: bool
) -> Split:
    """Split a model by a walk of its forward; with `longer`, it is proved for two lengths."""
    origin, prefixes = _origin(model, blocks, inputs)
    made = [_block(model, origin, number) for number in range(len(origin.spans))]
    found = _found_by_walk(model, made, prefixes, origin)
    if prove:
        changed = require_equal(model, made, inputs, origin.select, found.own_names)
        found.changing = frozenset(_places(made, changed))
    if prove and longer:
        require_equal(
            model, made, transformers_inputs_and_losses.example(model, longer=True), origin.select, found.own_names
        )
    if prove and origin.has_routers:
        require_equal_loss(model, made, inputs, found.loss_fn)
    return found


def _proved_trace(model: nn.Module, inputs: Mapping[str, Any]) -> Split:
    """Return the traced segments of a model, proved on some inputs; raises `Untraceable`, `MisfitError`."""
    found = _traced(model, parts := segments(model))
    require_equal(model, parts, inputs, lambda output: output, found.own_names)
    return found


def _found(
    model: nn.Module,
    made: Sequence[nn.Module],
    prefixes: Sequence[str],
    first: Mapping[int, str] = MappingProxyType({}),
    *,
    is_row: bool = False,
    **known: Any,
) -> Split:
    """Return a split with all that is known of it; weights that blocks share become tied copies.

    Names of saved tensors have these prefixes in the model, except tensors whose `first` name is given, by their ids.
    """
    both = list(zip(made, prefixes, strict=True))
    own_names = {
        f"{number}.{name}": first.get(id(tensor), f"{prefix}{name}")
        for number, (block, prefix) in enumerate(both)
        for name, tensor in saved_tensors(block).items()
    }
    found = Split(made, tied=untie(made), own_names=own_names, **known)
    found.copies = [Copies(model, both, is_row=is_row)]
    return found


def _found_by_walk(model: nn.Module, made: Sequence[nn.Module], prefixes: Sequence[str], origin: Origin) -> Split:
    is_known = transformers_inputs_and_losses.is_one(model)
    return _found(
        model,
        made,
        prefixes,
        config=getattr(model, "config", None),
        conversions=transformers_inputs_and_losses.conversions(model) if is_known else (),
        generation_config=getattr(model, "generation_config", None),
        loss_fn=_loss_of(model, origin) if is_known else None,
        aliases=_aliases(model),
        optional={*origin.unused, *chain.from_iterable(origin.flow.buffers)},
    )


def _places(blocks: Sequence[nn.Module], ids: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield (block number, name there) of the objects with these ids."""
    for number, block in enumerate(blocks):
        yield from ((number, n) for n, held in Snapshot({"": block}, numbers=False).holders() if held in ids)


def _loss_of(model: nn.Module, origin: Origin) -> Callable[..., Any] | None:
    loss = transformers_inputs_and_losses.loss_of(model)
    return router_losses.RouterLoss(model, loss) if origin.has_routers and loss is not None else loss


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each saved tensor that has several, by each of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in saved_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


MOST_PROVED = 20_000_000
"""Most weights of a model built without any for which they are made, on every rank, to prove the split."""


def _built(
    build: Callable[[], nn.Module],
    names: Sequence[str] | None,
    example: Tensor | Mapping[str, Any] | None,
    prove: bool,
) -> Split:
    """Split a model that is built without weights; the blocks are functions that make theirs."""
    model = built_without_weights(build)
    if transformers_inputs_and_losses.is_one(model):
        transformers_inputs_and_losses.require_whole_loss(model)
    if prove and sum(p.numel() for p in model.parameters()) <= MOST_PROVED:
        split(materialised(model, lambda: model), blocks=names, example=example)
    origin, prefixes = _origin(model, names, _example(model, example))
    made = [_block(model, origin, number) for number in range(len(origin.spans))]
    found = _found_by_walk(model, made, prefixes, origin)
    builders = [partial(materialised, model, partial(_block, model, origin, number)) for number in range(len(made))]
    return found.of(builders)


def _is_row(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a model only calls its modules one after the other."""
    has_own = "forward" in vars(model) or is_hooked(model)
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and not has_own


def _sequential(model: nn.Sequential) -> Split:
    """Return the entries of an `nn.Sequential`, which may have one module several times."""
    return _found(model, apart(model), [f"{key}." for key in model._modules], is_row=True)


def _traced(model: nn.Module, parts: Sequence[nn.Module]) -> Split:
    """Return traced segments, whose weights have the names that they have in the model."""
    first = {id(tensor): name for name, tensor in reversed(saved_tensors(model).items())}
    config = getattr(model, "pretrained_cfg", None)
    return _found(model, parts, [""] * len(parts), first, config=config, aliases=_aliases(model))


def _example(model: nn.Module, example: Tensor | Mapping[str, Any] | None, untraced: str = "") -> dict[str, Any]:
    """Return small inputs of a model by name; `untraced` says why it needs some."""
    names = _inputs(model)
    if isinstance(example, Tensor):
        return {names[0]: example}
    if example is not None:
        return dict(example)
    if transformers_inputs_and_losses.is_one(model):
        return transformers_inputs_and_losses.example(model)
    raise UsageError(
        f"{untraced}give an example of what {type(model).__name__}'s forward is called with: split(model, "
        "example=inputs), two samples are enough"
    )


def _inputs(model: nn.Module, example: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the inputs that a forward takes; a user's model takes all that its example has."""
    parameters = arguments_of(model.forward).values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    others = NOT_INPUTS if transformers_inputs_and_losses.is_one(model) else NOT_INPUTS.difference(example)
    if names := tuple(name for name in named if name not in others):
        return names
    raise UsageError(f"the forward of {type(model).__name__} names no inputs")


def _origin(model: nn.Module, blocks: Sequence[str] | None, inputs: Mapping[str, Any]) -> tuple[Origin, list[str]]:
    """Record the data flow between layers; return also the prefix of the weights' names in each block."""
    for name, given in inputs.items():
        if isinstance(given, Mapping | list | tuple):
            raise MisfitError(
                f"the forward of {type(model).__name__} takes {name!r} as a {type(given).__name__}, of which no part "
                "travels by itself; let it take tensors by name, forward(self, x, mask)"
            )
    layers = find_layers(model) if blocks is None else named_layers(model, blocks)
    frame = ModelFrame(model, layers)
    select = transformers_inputs_and_losses.select if transformers_inputs_and_losses.is_one(model) else _output
    settings = transformers_inputs_and_losses.settings(model) if transformers_inputs_and_losses.is_one(model) else {}
    has_routers = transformers_inputs_and_losses.is_one(model) and router_losses.asked(model)
    if has_routers:
        router_losses.watch(model)
        select, settings = router_losses.select, {**settings, router_losses.ASKS: False}
    called = {**inputs, **settings}
    search = partial(explore, select=select, is_own=not is_of_library(type(model)))
    found, is_one = search(frame, model, called), transformers_inputs_and_losses.is_one(model)
    pools, names = is_one and transformers_inputs_and_losses.pools(model), _inputs(model, inputs)
    origin = Origin(frame, found, names, settings, select, sees=is_one, pools=pools, has_routers=has_routers)
    origin.watch(model, lambda now: search(frame, now, called))
    origin.unused = _unused(model, origin.flow)
    calls, spans = origin.flow.calls, enumerate(origin.spans)
    return origin, [f"{calls[span.calls[0]]}." if origin.is_layer(number) else "" for number, span in spans]


def _unused(model: nn.Module, flow: Flow) -> list[str]:
    """Return the names of saved tensors that no part of the forward uses, without weights on the meta device."""
    modules = [model.get_submodule(name) for name in (*flow.calls, *chain.from_iterable(flow.beside))]
    used = {id(tensor) for module in modules for tensor in saved_tensors(module).values()}
    saved, read = saved_tensors(model), set(chain.from_iterable((*flow.weights, *flow.buffers)))
    used |= {id(tensor) for name, tensor in saved.items() if name in read}
    first = {id(tensor): name for name, tensor in reversed(saved.items())}
    return [name for key, name in first.items() if key not in used and not saved[name].is_meta]


def _block(model: nn.Module, origin: Origin, number: int) -> nn.Module:
    return (layer_block if origin.is_layer(number) else segment)(model, origin, number)


def _output(output: Any) -> Any:
    """Return a forward's output; of a tuple without other tensors, as (logits, None), the first entry."""
    is_one = isinstance(output, tuple) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output[1:]))
    return output[0] if is_one and output else output
