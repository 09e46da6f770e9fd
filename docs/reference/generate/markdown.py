"""Markdown of docstrings, tables and headings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import dedent

_SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Examples?):")
_ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)")
_TITLES = {"Args": "Arguments", "Raises": "Errors"}


def notice(what: str) -> str:
    """Return the line below a page's title."""
    return f"{what} Generated from the code by `make reference`; do not edit."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]


def one_line(words: str) -> str:
    """Return text on one line, safe outside of code spans."""
    return escaped(" ".join(words.split()))


def escaped(words: str) -> str:
    """Return text with what Markdown takes for HTML or emphasis escaped, outside of code spans."""
    parts = words.split("`")
    outside = (re.sub(r"([<*])", r"\\\1", part) for part in parts[::2])
    return "`".join(part for pair in zip(outside, [*parts[1::2], ""], strict=False) for part in pair).removesuffix(
        "`" * (len(parts) % 2)
    )


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def docstring(text: str) -> list[str]:
    """Return a docstring as Markdown: paragraphs, indented blocks as code, and sections of items as lists."""
    lines: list[str] = []
    for title, body in _sections(inspect.cleandoc(text).splitlines()):
        if title:
            lines += ["", f"**{_TITLES.get(title, title)}**", ""]
            lines += _items(dedent("\n".join(body)).splitlines())
        else:
            lines += _paragraphs(body)
    return lines


def _sections(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each section, "" for text outside of any, with its lines."""
    title, body = "", list[str]()
    for line in lines:
        found = _SECTION.fullmatch(line)
        if found or (title and line and not line.startswith(" ")):
            yield title, body
            title, body = (found[1], []) if found else ("", [line])
        else:
            body.append(line)
    yield title, body


def _paragraphs(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for is_code, block in _blocks(lines):
        if is_code:
            text = dedent("\n".join(block)).strip("\n")
            found += ["", f"```{'python' if _is_python(text) else 'text'}", *text.splitlines(), "```", ""]
        else:
            found += [*map(escaped, block)]
    return found


def _blocks(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield runs of lines that are indented, and of lines that are not; blank lines belong to the run before."""
    block: list[str] = []
    is_code = False
    for line in lines:
        is_indented = line.startswith("    ") if line.strip() else is_code
        if is_indented != is_code and block:
            yield is_code, block
            block = []
        is_code = is_indented
        block.append(line)
    if any(line.strip() for line in block):
        yield is_code, block


def _items(lines: Sequence[str]) -> list[str]:
    """Return "name: words", with indented lines that follow, as a list; other lines as they are.

    Where words end with a colon, the items below them are a list of their own.
    """
    found: list[str] = []
    has_list = False
    for line in lines:
        item, depth = _ITEM.fullmatch(line.strip()), len(line) - len(line.lstrip())
        if item and (not depth or (has_list and depth <= 4)):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            found.append(f"{'  ' * bool(depth)}- {names}: {escaped(item[2])}")
            has_list = has_list if depth else line.endswith(":")
        elif line.startswith(" ") and found:
            found[-1] += f" {escaped(line.strip())}"
            has_list = has_list or line.endswith(":")
        elif line.strip():
            found.append(escaped(line))
    return found


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def tidy(lines: Iterable[str]) -> str:
    """Return a page: single blank lines, no blanks at line ends, one line break at its end."""
    text = "\n".join(line.rstrip() for line in "\n".join(lines).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
