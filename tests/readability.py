"""Readability of a page's prose: sentence lengths, and Flesch's reading ease.

ease = 206.835 - 1.015 · words a sentence - 84.6 · syllables a word           (Flesch 1948; 60 to 70 is plain English)

Prose is what remains without code, tables, pictures, headings and the targets of links; names in backticks are left out
as well. Syllables are counted by groups of vowels.
"""

import re
from statistics import median

VOWELS = re.compile(r"[aeiouy]+")


def sentences(page: str) -> list[list[str]]:
    """Return the sentences of a page's prose, each as its words."""
    text = re.sub(r"^```.*?^```$", "\n\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\||#|!\[|    ).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\n\s*(?:[-*]|\d+\.) ", "\n\n", text)
    parts = re.split(r"\n\s*\n|(?<=[.!?])\s+", text)
    found = [re.findall(r"[A-Za-z][A-Za-z'’-]*", part) for part in parts]
    return [words for words in found if words]


def syllables(word: str) -> int:
    """Return how many syllables an English word has, by its groups of vowels."""
    return sum(max(1, _of_part(part)) for part in word.lower().split("-") if part)


def _of_part(word: str) -> int:
    word = word.replace("’", "'").removesuffix("'s")
    count = len(VOWELS.findall(word))
    is_silent = re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$|(?:[^aeiouyszxcg]|[^cs]h)es$|[aeiouy]le$", word)
    hiatus = len(re.findall(r"ism\b|i[ao](?!n)|eing", word))  # two syllables in one group
    return count + hiatus - (is_silent is not None and count > 1)


def reading_ease(page: str) -> float:
    """Return Flesch's reading ease of a page's prose."""
    found = sentences(page)
    words = [word for words in found for word in words]
    return 206.835 - 1.015 * len(words) / len(found) - 84.6 * sum(map(syllables, words)) / len(words)


def median_length(page: str) -> float:
    """Return the median of the number of words in a sentence."""
    return median(map(len, sentences(page)))
