"""Names that code reads, and names that it only writes to, by its bytecode, of Python 3.11 to 3.14.

norms[name] = g.norm()      log.append(x)      calls["a"] += 1      self.calls += 1        written
norms[name] / 2             log[-1]            len(calls)           self.calls > 3         read

                3.11              3.12                 3.13                 3.14
log.append      LOAD_METHOD       LOAD_ATTR NULL|self  the same             the same
log[k]          BINARY_SUBSCR     the same             the same             BINARY_OP []
log[i:k]        BUILD_SLICE and   BINARY_SLICE         the same             the same
return "log"    LOAD_CONST and    RETURN_CONST         the same             LOAD_CONST and
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import NamedTuple

_ADDERS = {"append", "appendleft", "add", "extend", "insert", "update"}
_NAMED = {*dis.hasname, *dis.hasfree}
FILL = "[]"
_MODE = re.compile("[rwaxbt+]{1,3}")
_WRITES = re.compile(
    r"(torch|np|numpy)\.save|save_file|\.(write_text|write_bytes|tofile)$|^os\.(replace|rename|putenv)$|^shutil\.|'.*[wax+]"
)
_READS = re.compile(
    r"(torch|np|numpy)\.(load|fromfile|memmap|genfromtxt)|load_file|\.(read_text|read_bytes|exists|is_file|isfile|iterdir)$"
    r"|^os\.(stat|listdir|scandir)$|^glob\.|^os\.(environ|getenv)$"
)


class NameUses(NamedTuple):
    """Names that code reads, names that it sets, and all names; calls that write and read files.

    If it sets entries of any container, `FILL` is among the names that it sets.
    """

    read: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()


def union_of(uses: Iterable[NameUses]) -> NameUses:
    """Return the union of several uses."""
    return NameUses(*(frozenset().union(*names) for names in zip(NameUses(), *uses, strict=True)))


@lru_cache(maxsize=4096)
def uses_in(code: CodeType) -> NameUses:
    """Return the uses in a code object, without those nested in it."""
    read, stored, named, writes, reads = (set[str]() for _ in NameUses._fields)
    steps = [*dis.get_instructions(code)]
    for place, step in enumerate(steps):
        is_text = isinstance(step.argval, str) and step.opname.endswith("_CONST")
        if is_text or (step.opname.startswith("LOAD_") and step.opcode in _NAMED and step.opname != "LOAD_CLOSURE"):
            named.add(step.argval)
            if not (is_written := _is_written(steps, place, is_text=is_text)):
                read.add(step.argval)
            if not is_text and (call := _call_of_files(steps, place)):
                (writes if is_written or _WRITES.search(call) else reads).add(call)
        elif step.opname.startswith(("STORE_", "DELETE_")) and step.opcode in _NAMED:
            stored.add(step.argval)
        if step.opname in ("STORE_SUBSCR", "STORE_SLICE") or _method_of(step) in {"setdefault", *_ADDERS}:
            stored.add(FILL)
    return NameUses(*map(frozenset, (read, stored, named, writes, reads)))


def _call_of_files(steps: Sequence[dis.Instruction], place: int) -> str:
    """Return the call at a place that writes or reads a file, in words; "": none."""
    step, above, mode = steps[place], 0, "r"
    name = f"{steps[place - 1].argval}.{step.argval}" if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else step.argval
    if step.argval != "open" or not (step.opname == "LOAD_GLOBAL" or _method_of(step)):
        return str(name) if _WRITES.search(name) or _READS.search(name) else ""
    for given in steps[place + 1 :]:
        if isinstance(given.argval, str) and given.opname == "LOAD_CONST" and _MODE.fullmatch(given.argval):
            mode = given.argval
        above += dis.stack_effect(given.opcode, given.arg, jump=False)
        if above <= 0:
            break
    return f"open(…, {mode!r})"


def _is_written(steps: Sequence[dis.Instruction], place: int, *, is_text: bool) -> bool:
    """Return whether the value loaded at a place is only written to, or updated in place."""
    name, after = steps[place].argval, steps[place + 1 :]
    if is_text:
        return bool(after) and after[0].opname.startswith(("STORE_", "DELETE_"))
    if place and steps[place - 1].opname == "COPY" and steps[place].opname == "LOAD_ATTR":  # self.calls += 1
        return True
    while after[0].opname == "LOAD_ATTR" and not _method_of(after[0]):
        after = after[1:]
    if (method := _method_of(after[0])) not in ("", "setdefault"):
        return method in _ADDERS
    above = 0  # stack depth above the loaded value
    for step, following in pairwise(after):
        is_of_it = above == 1 + step.opname.endswith("_SLICE")
        is_copy = step.opname == "COPY" and step.arg == above + 1 > 1  # calls["a"] += 1
        if is_copy or (is_of_it and step.opname in ("STORE_SUBSCR", "STORE_SLICE")):
            return True
        if is_of_it and _is_lookup(step):
            return _method_of(following) in _ADDERS
        if above == 1 and step.opname == "BINARY_OP":  # calls += 1
            return following.opname.startswith("STORE_") and following.argval == name and step.argrepr.endswith("=")
        above += dis.stack_effect(step.opcode, step.arg, jump=False)
        if above <= 0 or "JUMP" in step.opname or step.opname == "SWAP":
            return method != "" and step.opname == "CALL" and _method_of(following) in _ADDERS
    return False


def _method_of(step: dis.Instruction) -> str:
    """Return the name of the method that an instruction loads to call it; "": none."""
    is_method = step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL|self" in step.argrepr)
    return str(step.argval) if is_method else ""


def _is_lookup(step: dis.Instruction) -> bool:
    return step.opname in ("BINARY_SUBSCR", "BINARY_SLICE") or (step.opname == "BINARY_OP" and step.argrepr == "[]")
