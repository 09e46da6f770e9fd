"""Layouts as other frameworks write them: Megatron-LM's string, and torchtitan's list of module names for each stage.

    Et*3|(tt|)*29,m|L        E embedding, t decoder, m multi-token prediction, L loss; | between stages, in their order

`--pipeline-model-parallel-layout` repeats by `x*n` and `(…)*n`, and ignores commas.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise

import numpy as np

from quintsched.errors import UsageError, quoted
from quintsched.ir.instruction_columns import Ints
from quintsched.solve.stage_cuts.layer_costs import Kind, Layers

LETTERS: dict[Kind, str] = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
MOST_CHARACTERS = 2**16
"""Most characters of a layout that is written out."""


def stage_letters(layers: Layers, cut: Ints) -> list[str]:
    """Return the layers of each stage, a letter each."""
    letters = "".join(LETTERS[kind] for kind in layers.kinds)
    ends = layers.ends[cut].tolist()
    return [letters[first:end] for first, end in pairwise(ends)]


def megatron_layout(layers: Layers, cut: Ints) -> str:
    """Return Megatron-LM's layout string of a cut."""
    stages = [short_letters(letters) for letters in stage_letters(layers, cut)]
    text = ""
    for stage, group in groupby(stages[:-1]):
        number = len(list(group))
        text += _comma(text) + (f"{stage}|" * number if number < 3 else f"({stage}|)*{number}")
    return text + _comma(text) + stages[-1]


def _comma(text: str) -> str:
    """Return what sets a repetition apart from the next stage."""
    return "," if text[-1:].isdecimal() else ""


def torchtitan_modules(layers: Layers, cut: Ints) -> list[list[str]]:
    """Return torchtitan's `module_fqns_per_model_part` of a cut."""
    ends = layers.ends[cut].tolist()
    parts = (layers.modules[first:end] for first, end in pairwise(ends))
    return [[name for modules in part for name in modules] for part in parts]


def read_megatron_layout(text: str, layers: Layers) -> Ints:
    """Return the cut that a layout string describes; raises `UsageError` if it is not one of these layers."""
    found = _unrolled(text)
    unknown = set(found) - {*LETTERS.values(), "|"}
    if unknown:
        raise UsageError(f"layout {quoted(text)}: {quoted(min(unknown))} is none of E, t, m, L and |")
    stages = found.split("|")
    letters, own = "".join(stages), "".join(LETTERS[kind] for kind in layers.kinds)
    if letters != own:
        raise UsageError(
            f"layout {quoted(text)}: it has the layers {short_letters(letters)}, the costs have {short_letters(own)}"
        )
    number = 0
    ends = [0, *((number := number + len(stage)) for stage in stages)]
    places = {int(end): piece for piece, end in enumerate(layers.ends)}
    missing = [end for end in ends if end not in places]
    if missing:
        raise UsageError(f"layout {quoted(text)}: it divides the layers of multi-token prediction; keep them together")
    return np.array([places[end] for end in ends])


def _unrolled(text: str) -> str:
    """Return a layout string without its repetitions."""
    text = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([^*()\d])\*(\d+)"):
        repeated = re.findall(pattern, text)
        if any(len(part) * float(times) > MOST_CHARACTERS for part, times in repeated) or len(text) > MOST_CHARACTERS:
            raise UsageError(f"the layout has over {MOST_CHARACTERS} characters when it is written out")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text


def short_letters(letters: str) -> str:
    """Return letters with three and more of a kind as a number: Et*3."""
    runs = ((letter, len(list(group))) for letter, group in groupby(letters))
    return "".join(letter * number if number < 3 else f"{letter}*{number}" for letter, number in runs)
