"""Instruction fine-tuning: pairs of a prompt and an answer, where only the answer is learnt.

    prompt          answer                       ids      p p p p a a E       E the end, if there is an id for it
    "2 + 3 ="       " 5"                         labels   - - - - a a E       - ignored (-100)

    pad_batch       p p p p a a E                attention_mask   1 1 1 1 1 1 1
                    p p a E 0 0 0                                 1 1 1 1 0 0 0

Labels are those of their own position, as models of transformers take them, which shift by themselves. For a model that
does not, as the built-in `gpt`, `pad_batch(…, shift=True)` shifts; padding is behind all tokens, where causal attention
needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from quintsched.errors import UsageError

from .batches_from_text_stream import Encode, encode_bytes
from .memory_dataset import IGNORED_TARGET

PairEncoder = Callable[[str, str], tuple[Sequence[int], Sequence[int]]]
"""Prompt, answer → ids of the prompt, ids of the answer with its end."""


def concatenated(encode: Encode = encode_bytes, end: int | None = None) -> PairEncoder:
    """Return an encoder of pairs as they are, one after the other; each is encoded alone.

    `encode` is text → ids, by default the bytes of UTF-8; `end` is an id that ends an answer.
    """

    def encoder(prompt: str, answer: str) -> tuple[Sequence[int], Sequence[int]]:
        return list(encode(prompt)), [*encode(answer), *([] if end is None else [end])]

    return encoder


def chat(tokenizer: Any, system: str | None = None) -> PairEncoder:
    """Return an encoder of pairs by the chat template of a tokenizer of transformers.

    The prompt is the turn of a user, behind `system` if there is one, up to where the assistant's turn begins; the
    answer is the assistant's turn, with all that the template ends it by. Each is tokenized alone. The encoder raises
    `UsageError` for a template that begins otherwise where there is an answer.
    """
    before = [] if system is None else [{"role": "system", "content": system}]

    def encoder(prompt: str, answer: str) -> tuple[Sequence[int], Sequence[int]]:
        asked = [*before, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": answer}], tokenize=False)
        if not whole.startswith(text):
            raise UsageError(
                "the chat template does not begin alike with and without an answer, so that the prompt cannot be told "
                "from it; give an encoder of your own: (prompt, answer) → (ids, ids)"
            )
        ids, answer_ids = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, whole[len(text) :])
        )
        return ids, answer_ids

    return encoder


class PromptAnswers(Dataset[dict[str, Tensor]]):
    """Pairs as samples: {"input_ids": int64 (length,), "labels": the same, with -100 where the prompt is}.

    Args:
        pairs: prompts and answers, by an index.
        encoder: `concatenated(…)`, `chat(…)`, or a function of yours.
        longest: ids of a sample, whose end is cut off where it has more; None: no limit. A pair whose prompt fills it
            has no labels.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], encoder: PairEncoder, longest: int | None = None) -> None:
        self._pairs, self._encoder, self._longest = pairs, encoder, longest

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, answer = self._encoder(*self._pairs[index])
        ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED_TARGET
        return {"input_ids": ids[: self._longest], "labels": labels[: self._longest]}


def pad_batch(
    samples: Sequence[Mapping[str, Tensor]], *, pad: int = 0, multiple: int = 1, shift: bool = False
) -> dict[str, Tensor]:
    """Return a batch of samples of different lengths, padded behind their ids: a `collate_fn`.

    Args:
        samples: those of `PromptAnswers`.
        pad: id of padding.
        multiple: number that the length of the batch is a multiple of, as cp and sequence parallelism need it.
        shift: whether labels are those of the next position, for models that do not shift; without a mask then.

    Returns "input_ids" and "labels", int64 (samples, length), and "attention_mask", the same, 1 where there is an id.
    """
    ids = [sample["input_ids"][:-1] if shift else sample["input_ids"] for sample in samples]
    labels = [sample["labels"][1:] if shift else sample["labels"] for sample in samples]
    length = max(map(len, ids))
    shape = len(samples), -(-length // multiple) * multiple
    batch = {
        "input_ids": torch.full(shape, pad, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED_TARGET, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, (mine, wanted) in enumerate(zip(ids, labels, strict=True)):
        for name, part in (("input_ids", mine), ("labels", wanted), ("attention_mask", torch.ones_like(mine))):
            batch[name][row, : len(mine)] = part
    if shift:
        del batch["attention_mask"]
    return batch
