"""Commands on checkpoints, run in this process."""

import json
from typing import Any

from quintsched.runtime.saving.offline import __main__ as offline


def main(words: list[str]) -> int:
    """Run a command as the command line gives it: path, then flags."""
    command, path, *rest = words
    given: dict[str, Any] = {"path": path}
    for place, word in enumerate(rest):
        if word.startswith("--"):
            value = rest[place + 1] if place + 1 < len(rest) and not rest[place + 1].startswith("--") else True
            is_number = isinstance(value, str) and value.isdecimal()
            given[word[2:].replace("-", "_")] = int(value) if is_number else value
    return offline.main([command, json.dumps(given)])
