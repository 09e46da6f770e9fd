"""Model and data of `finetune.yaml`: a causal language model of transformers, on texts of different lengths.

build    the model in the folder of `model.pretrained`, or else a tiny LLaMA
load     each replica's batches, as DataCollators make them: padded to the longest text of a batch, the last one smaller
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from quintsched.runtime.data import DataSpec, Loaders

PROVERBS = (
    """a bird in the hand is worth two in the bush|a stitch in time saves nine|actions speak louder than words
all that glitters is not gold|better late than never|birds of a feather flock together|every cloud has a silver lining
fortune favours the bold|half a loaf is better than none|haste makes waste|he who laughs last laughs longest
honesty is the best policy|look before you leap|make hay while the sun shines|many hands make light work
no man is an island|no smoke without fire|practice makes perfect|rome was not built in a day|still waters run deep
the early bird catches the worm|the pen is mightier than the sword|there is no place like home|time flies
too many cooks spoil the broth|two heads are better than one|when in rome do as the romans do|where there is a will
""".replace("\n", "|")
    .strip("|")
    .split("|")
)  # 28 texts, byte by byte


def build(data: DataSpec, pretrained: str | None = None, layers: int = 4) -> nn.Module:
    """Return the model; the engine reads the weights in `pretrained`, each rank its slices."""
    if pretrained is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pretrained))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes))


def load(replica: int, num_replicas: int, batch_size: int = 8) -> Loaders:
    """Return a replica's batches: every text but the last six trains."""

    def batches(texts: list[str]) -> DataLoader:
        def mine(batch: list[str]) -> dict[str, Tensor]:
            first, end = (len(batch) * part // num_replicas for part in (replica, replica + 1))
            return padded(batch[first:end])

        return DataLoader(texts, batch_size, collate_fn=mine)

    return Loaders(batches(PROVERBS[:-6]), validation=batches(PROVERBS[-6:]))


def padded(texts: list[str]) -> dict[str, Tensor]:
    """Return texts as a batch: ids, 0 as padding, an attention mask, and labels, -100 on padding."""
    rows = [torch.tensor(list(text.encode())) for text in texts]
    ids = pad_sequence(rows, batch_first=True)
    is_text = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": is_text.long(), "labels": ids.where(is_text, -100)}
