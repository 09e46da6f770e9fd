"""Strict YAML parser: refuses duplicate keys, reads 1e-4 as a number, and constructs plain data only.

Plain data are mappings, lists, texts, numbers, true, false and null: 2024-01-01 is a text, and other tags are
refused. A small file may expand to huge data: `[*a, *a]` nested nine times, an alias within its own anchor, thousands
of brackets. So there are limits on bytes, tokens, nesting depth, and nodes after the expansion of aliases.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from quintsched.errors import MOST_QUOTED, InputError, QuintschedError, printable, quoted

MOST_BYTES, MOST_TOKENS, MOST_DEPTH, MOST_NODES = 2**18, 20_000, 64, 100_000
MOST_DIGITS = 1000
"""Maximum number of characters of a number."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader that refuses duplicate keys, has limits, and reads YAML 1.2's numbers."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self._tokens = 0
        self._sizes: dict[int, int] = {}  # nodes below each node id, with aliases expanded

    def fetch_more_tokens(self) -> None:
        self._tokens += 1
        if self._tokens > MOST_TOKENS:
            raise yaml.scanner.ScannerError(None, None, f"more than {MOST_TOKENS} tokens", self.get_mark())
        if self.flow_level + len(self.indents) > MOST_DEPTH:
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_more_tokens()

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if is_alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias lies within what it stands for", node.start_mark)
        if not is_alias:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in _parts(node))
        if self._sizes[id(node)] > MOST_NODES:
            raise yaml.composer.ComposerError(None, None, "aliases stand for too much", node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _PLAIN:
            raise yaml.constructor.ConstructorError(
                None, None, f"{_tag(node)} is no plain data; leave out the tag", node.start_mark
            )
        try:
            if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
                raise ValueError
            made = super().construct_object(node, deep)
            if isinstance(made, str):
                made.encode()  # refuse lone surrogates, which no file could hold
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # each tag's constructor raises its own kinds
            raise yaml.constructor.ConstructorError(
                None, None, f"{quoted(node.value)} is not a {_tag(node)}", node.start_mark
            ) from None
        return made

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_YAML = "tag:yaml.org,2002:"
_NUMBERS = (_YAML + "int", _YAML + "float")
_PLAIN = {_YAML + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null")}


def _tag(node: yaml.Node) -> str:
    """Return a tag as a YAML file writes it."""
    return printable(str(node.tag).replace(_YAML, "!!"), MOST_QUOTED)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


_Loader.yaml_implicit_resolvers = {
    first: [(tag, text) for tag, text in found if tag in _PLAIN or tag == _YAML + "merge"]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(content: bytes | str, source: str, fault: type[QuintschedError] = InputError) -> Any:
    """Return the data of one YAML document; raises `fault` with the source, the line and the column."""
    if len(content) > MOST_BYTES:
        raise fault(f"{source}: it has {len(content)} bytes, more than the {MOST_BYTES} that are read")
    try:
        return yaml.load(content, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise fault(f"{source}{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # such as the escape "\UFFFFFFFF"
        raise fault(f"{source}: is not YAML: {error}") from None
    except RecursionError:
        raise fault(f"{source}: is nested too deeply") from None
