"""YAML read strictly: a key given twice is an error, 1e-4 is a number, and nothing but plain data comes out."""

from __future__ import annotations

import re
from typing import Any

import yaml

from quintsched.errors import InputError, QuintschedError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but strict about keys given twice, and with YAML 1.2's numbers."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(content: bytes | str, source: str, fault: type[QuintschedError] = InputError) -> Any:
    """Return what one YAML document says; raises `fault` with the source, the line and the column."""
    try:
        return yaml.load(content, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise fault(f"{source}{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise fault(f"{source}: is not YAML: {error}") from None
    except RecursionError:
        raise fault(f"{source}: is nested too deeply") from None
