"""What an engine has of the files of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .exchange import Exchange
from .load_pretrained import LoadedWeights


class CheckpointFiles:
    """Reads and writes folders of safetensors, and PyTorch's distributed checkpoints."""

    _exchange: Exchange

    def load_pretrained(
        self,
        path: str | Path,
        *,
        names: Mapping[str, str] | None = None,
        fresh: Sequence[str] = (),
        strict: bool = True,
    ) -> LoadedWeights:
        """Let weights and buffers be those of a safetensors folder; each rank reads its own slices (collective).

        It is meant for an engine that has not stepped yet: the optimizer's state stays.

        Args:
            path: a file, an index, or the folder of either.
            names: our names ("3.attn.weight") to those in the checkpoint. None: the model's own where blocks come from
                `split`, GPT-2's for a built-in GPT of that shape, else ours; with or without a first part ("model.").
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.

        Returns what stayed fresh, and what was not used.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for a file that is damaged
        or lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return self._exchange.load_pretrained(path, names, fresh, strict=strict)

    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 * 10**9
    ) -> None:
        """Write a folder that `from_pretrained` of transformers reads: weights and buffers under their own names.

        Collective. Tensors are gathered one by one, by the first rank of each pipeline coordinate, which writes
        them; weights that are tied are saved once. What was in the folder before stays until the new files are whole;
        files of other names stay after it.

        Args:
            path: the folder.
            dtype: the type of floating-point weights; None: the one that blocks compute with. With bf16, float32 gives
                the masters that the optimizer works on.
            max_file_bytes: weights are cut into several files beyond this size, and between pipeline coordinates.

        Raises `UsageError` on all ranks where it cannot be written.
        """
        self._exchange.save_pretrained(path, dtype, max_file_bytes)

    def save_dcp(self, path: str | Path) -> None:
        """Write weights and optimizer state as `torch.distributed.checkpoint` does, each rank its shards (collective).

        Any mesh loads it, and so does PyTorch without us: see docs/checkpoints.md. What was in the folder before stays
        until the new files are whole.

        Raises, on all ranks alike, `UsageError` where it cannot be written, `MisfitError` for optimizer state that is
        neither a weight's shape nor whole.
        """
        self._exchange.save_dcp(path, {})

    def load_dcp(
        self, path: str | Path, *, fresh: Sequence[str] = (), strict: bool = True, optimizer: bool = True
    ) -> LoadedWeights:
        """Take over a checkpoint of `torch.distributed.checkpoint`, of whatever mesh or program (collective).

        Its table is a pickle, which is read without running anything; values are read as plain data only.

        Args:
            path: the folder.
            fresh: patterns on names of weights that the checkpoint need not have: they keep their initial values.
            strict: whether a tensor that no weight takes is an error.
            optimizer: whether the optimizer's state is taken over too, where there is one; settings of groups are not.

        Returns what stayed fresh, and what was not used.

        Raises, on all ranks alike, `UsageError` where there is no such folder, `InputError` for one that is damaged or
        lacks a tensor, `MisfitError` for other shapes, or tensors beyond the model's.
        """
        return self._exchange.load_dcp(path, fresh, strict=strict, optimizer=optimizer)[0]
