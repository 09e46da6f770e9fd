"""Pairs of prompt and answer: only answers are learnt, batches are padded, and a job on them is that of one process."""

from functools import partial

import pytest
from torch.utils.data import DataLoader

from quintsched.errors import UsageError
from quintsched.runtime.data import IGNORED_TARGET, PromptAnswers, chat, concatenated, pad_batch
from quintsched.runtime.data.user_loaders import batch_of

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


class Letters:
    """A tokenizer with a chat template, a letter per id."""

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
