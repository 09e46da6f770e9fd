"""Column- and row-parallel linear layers, and a vocabulary-parallel embedding.

           ┌ W_0 ┐                    column: each rank computes a shard of the output features
    x ───▶ │ ... │ ───▶ [y_0 | y_1]   row:    each rank takes a shard of the input features; the partial
           └ W_n ┘                            results are all-reduced, then the bias is added

Built from sizes, a layer draws the full weight and keeps its slice, so ranks with the same seed hold slices of the same
full layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from quintsched.check_call_arguments import WHOLE_NUMBER, ours, takes
from quintsched.errors import MisfitError

from ...autograd.deferred_weight_grads import embedding, linear
from ...blocks.block_builders import TOKENS_DIM
from ...comm import Group
from ...comm.autograd_collectives import reduce_from_group, reduce_scatter, scatter_to_group
from ...settings.tensor_parallel_rules import FusedParts
from ..mesh_independent_dropout import ColumnRowPair
from .column_matmul import InputCommunication, column_product
from .cuttable_layers import is_conv1d, sizes_of
from .parameter_shards import TpShard, gather_blocks, mark_shard, require_same, take_shard

Exit = Literal["sum", "scatter", "none"]
"""Communication of a row layer's output: all-reduce ("sum"); reduce-scatter to each rank's slice of the tokens
("scatter"); or none: the output is a partial sum, which the caller reduces."""

Sharded = TypeVar("Sharded", bound="ShardedModule")


class ShardedModule(nn.Module):
    """Base class of modules with parameters cut over `group`; each keeps its `TpShard` in copies and loads."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self._shards: dict[str, TpShard] = {}

    def _adopt(self, name: str, full: Tensor | None, dim: int | None, parts: FusedParts = 1) -> None:
        """Register a parameter `name`: this rank's slice of `full` along `dim`, or a copy of all if `dim` is None."""
        if full is None:
            self.register_parameter(name, None)
            return
        if dim is not None:
            self._shards[name] = TpShard(dim, parts, self.group.index, self.group.size)
        mine = take_shard(full, self._shards[name]) if dim is not None else full.detach().clone()
        self.register_parameter(name, nn.Parameter(mine, requires_grad=full.requires_grad))
        self._mark()

    def _mark(self) -> None:
        for name, shard in self._shards.items():
            mark_shard(self.get_parameter(name), shard)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self: Sharded, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Sharded:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._mark()


class ColumnParallelLinear(ShardedModule):
    """A linear layer that computes this rank's shard of the output features: (…, in) to (…, out / size).

    Args:
        in_features: full width of the input.
        out_features: full width of the output.
        group: the ranks over which it is cut.
        bias: whether there is one; it is cut like the output.
        parts: number of fused blocks in the output (3 for a fused QKV), or their proportions; each rank gets its
            shard of every block (see `parameter_shards`).
        gather_output: return the full output (…, out) on all ranks.
        entry: communication of the input (see `column_matmul`).
        transposed: the weight is (in, out), as that of transformers' Conv1D.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        MisfitError: `parts` × size does not divide `out_features`.
    """

    deferrable = ("weight", "bias")
    weight: nn.Parameter
    bias: nn.Parameter | None

    @takes(
        "ColumnParallelLinear(in_features, out_features, group)",
        in_features=WHOLE_NUMBER,
        out_features=WHOLE_NUMBER,
        group=ours("Group"),
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        parts: FusedParts = 1,
        gather_output: bool = False,
        entry: InputCommunication = "copy",
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features = in_features
        self.out_features = out_features
        self.transposed = transposed
        self.parts = parts
        self.gather_output = gather_output
        self.entry: InputCommunication = entry
        self.pair: ColumnRowPair | None = None
        self._take(_full_linear(in_features, out_features, bias, device, dtype, transposed))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: Group,
        *,
        parts: FusedParts = 1,
        gather_output: bool = False,
        entry: InputCommunication = "copy",
    ) -> ColumnParallelLinear:
        """Take this rank's slice of a linear layer."""
        has, flipped = linear.bias is not None, is_conv1d(linear)
        layer = cls(
            *sizes_of(linear),
            group,
            bias=has,
            parts=parts,
            gather_output=gather_output,
            entry=entry,
            transposed=flipped,
            device="meta",
        )
        layer._take(linear)
        return layer.train(linear.training)

    def _take(self, full: nn.Module) -> None:
        self._adopt("weight", full.get_parameter("weight"), 1 if self.transposed else 0, self.parts)
        self._adopt("bias", full._parameters.get("bias"), 0, self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out / size), or (…, out) with `gather_output`."""
        if self.pair is not None:
            self.pair.is_between = True
        weight = self.weight.t() if self.transposed else self.weight
        y = column_product(x, weight, self.bias, self.group, self.entry, self.pair)
        if not self.gather_output:
            return y
        return gather_blocks(y, self.group, -1, self.parts)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with full sizes."""
        cut = f"parts={self.parts}, gather_output={self.gather_output}, tp={self.group.size}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {cut}"


class RowParallelLinear(ShardedModule):
    """A linear layer that takes this rank's shard of the input features: (…, in / size) to (…, out).

    Args:
        in_features: full width of the input.
        out_features: full width of the output.
        group: the ranks over which it is cut.
        bias: whether there is one; it is replicated, and added once, after the reduction over the ranks.
        input_is_parallel: the input is already this rank's shard, as a column layer returns it; otherwise it is full.
        exit: communication of the partial results (see `Exit`).
        transposed: the weight is (in, out), as that of transformers' Conv1D.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        MisfitError: the size does not divide `in_features`, biases differ between ranks, or there is a bias that
            would be added once per rank.
    """

    deferrable = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    @takes(
        "RowParallelLinear(in_features, out_features, group)",
        in_features=WHOLE_NUMBER,
        out_features=WHOLE_NUMBER,
        group=ours("Group"),
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        exit: Exit = "sum",
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features = in_features
        self.out_features = out_features
        self.transposed = transposed
        self.input_is_parallel = input_is_parallel
        self.exit: Exit = exit
        self.pair: ColumnRowPair | None = None
        self._take(_full_linear(in_features, out_features, bias, device, dtype, transposed))

    @classmethod
    def from_linear(
        cls, linear: nn.Module, group: Group, *, input_is_parallel: bool = True, exit: Exit = "sum"
    ) -> RowParallelLinear:
        """Take this rank's slice of a linear layer."""
        has, flipped = linear.bias is not None, is_conv1d(linear)
        layer = cls(
            *sizes_of(linear),
            group,
            bias=has,
            input_is_parallel=input_is_parallel,
            exit=exit,
            transposed=flipped,
            device="meta",
        )
        layer._take(linear)
        return layer.train(linear.training)

    def _take(self, full: nn.Module) -> None:
        bias = full._parameters.get("bias")
        self._adopt("weight", full.get_parameter("weight"), 0 if self.transposed else 1)
        if bias is not None and self.exit == "none":
            raise MisfitError("a row layer whose results are added up later cannot have a bias: it would count often")
        self._adopt("bias", bias, None)
        require_same({"bias": self.bias} if self.bias is not None else {}, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in / size), or (…, in) without `input_is_parallel`, to (…, out); with "scatter", of a token slice.

        Raises:
            MisfitError: the input has another width.
        """
        if not self.input_is_parallel:
            x = scatter_to_group(x, self.group, -1)
        weight = self.weight.t() if self.transposed else self.weight
        if x.shape[-1] != weight.shape[1]:
            raise MisfitError(
                f"a row-parallel layer over {self.group.size} ranks takes {weight.shape[1]} of {self.in_features} "
                f"features, but its input is {tuple(x.shape)}; is the layer before it column-parallel?"
            )
        try:
            y = self._leave(linear(x, weight))
        finally:  # a rerun by torch.utils.checkpoint may stop early, by an exception
            if self.pair is not None:
                self.pair.leave()
        return y if self.bias is None else y + self.bias

    def _leave(self, partial: Tensor) -> Tensor:
        match self.exit:
            case "sum":
                return reduce_from_group(partial, self.group)
            case "scatter":
                return reduce_scatter(partial, self.group, TOKENS_DIM)
            case "none":
                return partial

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with full sizes."""
        cut = f"input_is_parallel={self.input_is_parallel}, tp={self.group.size}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {cut}"


def _full_linear(
    taken: int, given: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None, transposed: bool
) -> nn.Linear:
    full = nn.Linear(taken, given, bias, device, dtype)
    if transposed:
        full.weight = nn.Parameter(full.weight.detach().t().contiguous())
    return full


class VocabParallelEmbedding(ShardedModule):
    """An embedding sharded by ids, a contiguous range of rows per rank: (…) integers to (…, embedding_dim).

    Args:
        num_embeddings: full number of ids.
        embedding_dim: width of the output.
        group: the ranks over which it is cut.
        padding_idx: id whose row gets no gradient.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        MisfitError: the size does not divide `num_embeddings`.
    """

    deferrable = ("weight",)
    weight: nn.Parameter

    @takes(
        "VocabParallelEmbedding(num_embeddings, embedding_dim, group)",
        num_embeddings=WHOLE_NUMBER,
        embedding_dim=WHOLE_NUMBER,
        group=ours("Group"),
    )
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = full.padding_idx
        self._adopt("weight", full.weight, 0)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: Group) -> VocabParallelEmbedding:
        """Take this rank's rows of `embedding`."""
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise MisfitError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut; replicate it")
        sizes = (embedding.num_embeddings, embedding.embedding_dim)
        layer = cls(*sizes, group, padding_idx=embedding.padding_idx, device="meta")
        layer._adopt("weight", embedding.weight, 0)
        return layer.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (…) to rows (…, embedding_dim).

        Raises:
            IndexError: an id out of range, on every rank (on CUDA: a device-side assertion, as with nn.Embedding).
        """
        num_local = self.weight.shape[0]
        local = ids - self.group.index * num_local
        is_elsewhere = (ids >= 0) & (ids < self.num_embeddings) & ((local < 0) | (local >= num_local))
        # Invalid ids stay out of range, so that the lookup itself raises.
        rows = embedding(local.masked_fill(is_elsewhere, 0), self.weight, self._local_padding())
        return reduce_from_group(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.group)

    def _local_padding(self) -> int | None:
        num_local = self.weight.shape[0]
        if self.padding_idx is None or self.padding_idx // num_local != self.group.index:
            return None
        return self.padding_idx % num_local

    def extra_repr(self) -> str:
        """Describe the layer as nn.Embedding does, with full sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.group.size}"
