"""Pairs of prompt and answer: only answers are learnt, batches are padded, and a job on them is that of one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from quintsched.errors import UsageError
from quintsched.runtime.data import IGNORED_TARGET, PromptAnswers, chat, concatenated, pad_batch
from quintsched.runtime.data.user_loaders import batch_of
from quintsched.runtime.launch.worker import main

NO = IGNORED_TARGET
PAIRS = [("ab", "c"), ("a", "bcd"), ("abcde", "f")]


def ids(text: str) -> list[int]:
    return [ord(letter) - 96 for letter in text]


def test_prompts_are_no_targets() -> None:
    samples = PromptAnswers(PAIRS, concatenated(ids, end=9), longest=5)
    assert samples[0]["input_ids"].tolist() == [1, 2, 3, 9]
    assert samples[0]["labels"].tolist() == [NO, NO, 3, 9]
    assert samples[1]["labels"].tolist() == [NO, 2, 3, 4, 9]
    assert samples[2]["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert samples[2]["labels"].tolist() == [NO] * 5
    text = PromptAnswers([("é", "!")], concatenated())[0]
    assert text["input_ids"].tolist() == [0xC3, 0xA9, ord("!")]


def test_batches_are_padded_behind() -> None:
    samples = PromptAnswers(PAIRS, concatenated(ids, end=9))
    batch = next(iter(DataLoader(samples, batch_size=2, collate_fn=partial(pad_batch, pad=7, multiple=4))))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 7, 7, 7, 7], [1, 2, 3, 4, 9, 7, 7, 7]]
    assert batch["labels"].tolist() == [[NO, NO, 3, 9] + [NO] * 4, [NO, 2, 3, 4, 9] + [NO] * 3]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 5 + [0] * 3]
    inputs, targets, extras = batch_of(batch)
    assert (inputs is batch["input_ids"], targets is batch["labels"], list(extras)) == (True, True, ["attention_mask"])


def test_labels_can_be_shifted() -> None:
    batch = pad_batch([PromptAnswers(PAIRS, concatenated(ids, end=9))[number] for number in (0, 1)], shift=True)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[NO, 3, 9, NO], [2, 3, 4, 9]]
    assert "attention_mask" not in batch


class Letters:
    """A tokenizer with a chat template, a letter per id."""

    template = "{role}:{content};"

    def apply_chat_template(
        self, turns: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        return "".join(f"<{turn['role'][0]}>{turn['content']};" for turn in turns) + "<a>" * add_generation_prompt

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


class Reworded(Letters):
    def apply_chat_template(self, turns: list[dict[str, str]], **options: bool) -> str:
        return f"{len(turns)}" + super().apply_chat_template(turns, **options)


def test_a_chat_template_says_where_the_answer_begins() -> None:
    sample = PromptAnswers([("hi", "yes")], chat(Letters(), system="be brief"))[0]
    assert "".join(map(chr, sample["input_ids"].tolist())) == "<s>be brief;<u>hi;<a>yes;"
    assert "".join(chr(label) for label in sample["labels"].tolist() if label != NO) == "yes;"
    with pytest.raises(UsageError, match="does not begin alike with and without an answer"):
        PromptAnswers([("hi", "yes")], chat(Reworded()))[0]


def test_a_chat_template_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<user>", "<assistant>", "<end>", "hi", "yes"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    sample = PromptAnswers([("hi", "yes yes")], chat(fast))[0]
    assert sample["input_ids"].tolist() == [1, 4, 3, 2, 5, 5, 3]
    assert sample["labels"].tolist() == [NO] * 4 + [5, 5, 3]


DATA = """
from functools import partial
import torch
from torch.utils.data import DataLoader
from quintsched.runtime.data import DataSpec, Loaders, PromptAnswers, concatenated, pad_batch

PAIRS = [(f"{a} + {b} =", f" {a + b}") for a in range(6) for b in range(4, 8)]


def load(replica, num_replicas):
    share = 8 // num_replicas
    batches = [range(first + replica * share, first + (replica + 1) * share) for first in range(0, 24, 8)]
    samples = PromptAnswers(PAIRS, concatenated(end=0))
    collate = partial(pad_batch, multiple=4, shift=True)
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate)
    return Loaders(loader, spec=DataSpec(input_shape=(16,), num_classes=256))
"""
JOB = """
model: {name: gpt, options: {hidden: 16, depth: 2, heads: 2, positions: rope}}
data: {name: "my_pairs.py:load"}
parallel: {mesh: "MESH", microbatches: 2}
train: {batch_size: 8, epochs: 2}
runtime: {transport: local, precision: float64}
log: {path: log.jsonl, every: 1}
"""


def test_a_job_on_pairs_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_pairs.py").write_text(DATA)

    def losses(mesh: str) -> list[float]:
        Path("job.yaml").write_text(JOB.replace("MESH", mesh))
        Path("log.jsonl").unlink(missing_ok=True)
        assert main(["--config", "job.yaml"]) == 0
        records = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if record["event"] == "step"]

    alone = losses("dp=1")
    assert alone[-1] < alone[0]
    assert torch.tensor(losses("dp=2,pp=2")) == pytest.approx(torch.tensor(alone), abs=1e-10)
