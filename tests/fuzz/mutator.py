"""Broken inputs made of good ones: fast, and the same again for the same seed.

a good file ─▶ one to four of: flip, cut, insert, repeat, splice with another, a word for a word, deep nesting,
               a huge number, a long string, a key twice, bytes that are no text ─▶ at most a megabyte
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

MOST_BYTES = 10**6

NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9.]*")
PAIR = re.compile(rb'"[^"\n]{1,40}" ?: ?[^,{}\[\]\n]{1,40}')

NUMBERS = (
    b"0", b"-1", b"1", b"2147483648", b"-9223372036854775809", b"18446744073709551616", b"16777216", b"16777217",
    b"1e308", b"1e999", b"-1e-999", b"5e-324", b"NaN", b"Infinity", b"-0.0", b"0.1", b"true", b"null", b"[]", b"{}",
    b'""', b'"1"', b"1" * 400, b"9" * 5000, b"0x10", b"1_000", b".inf", b"~", b"[[]]", b"99999999",
)  # fmt: skip
PIECES = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"\n", b"\r", b"\t", b"\0", b"\xff",
    b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"&a ", b"*a", b"<<: *a", b"---\n",
    b"!!python/object:os.system ", b"!!bool ", b"!!int ", b"!!float ", b"!!timestamp ", b"!!set ", b"!!merge ",
    b"? ", b"- ", b"|\n ", b"%YAML 9.9\n", b"#", b"'", b"\xf0\x9f\x98\x80", b"../../etc/passwd", b"$(id)",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**24, 2**63, 10**300, 1e308, 0.5, "", "x", "dp", "Fwd", "\0", "é" * 300, [], {},
    [0], [[]], {"a": 1}, [0] * 3000, {str(n): n for n in range(1000)},
)  # fmt: skip
TALL: tuple[tuple[bytes, bytes], ...] = ((b"[", b"]"), (b'{"a":', b"}"), (b"- ", b""), (b"{a: ", b"}"), (b"(", b")"))


class Mutator:
    """Makes inputs of some good ones; `random_seed` fixes them all. With `stays_json` only values are changed."""

    def __init__(self, seeds: Sequence[bytes], random_seed: int, *, stays_json: bool = False) -> None:
        self._seeds, self._random = seeds, random.Random(random_seed)
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            *(self._other_value,) * 3,
            self._other_number,
        ) if stays_json else (
            *(self._flip, self._cut_end, self._cut_out, self._insert, self._repeat, self._splice) * 2,
            *(self._other_number, self._other_word, self._double_key) * 3,
            *(self._other_value,) * 8,
            self._nest, self._long, self._noise,
        )  # fmt: skip

    def make(self) -> bytes:
        """Return the next input."""
        data = bytearray(self._random.choice(self._seeds))
        for _ in range(self._random.choice((1, 1, 1, 2, 2, 3, 4))):
            self._random.choice(self._ways)(data)
        return bytes(data[:MOST_BYTES])

    def _place(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        for _ in range(self._random.choice((1, 1, 2, 8))):
            if data:
                data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _cut_end(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _cut_out(self, data: bytearray) -> None:
        start = self._place(data)
        del data[start : start + self._random.choice((1, 2, 10, 100))]

    def _insert(self, data: bytearray) -> None:
        place = self._place(data)
        data[place:place] = self._random.choice(PIECES) * self._random.choice((1, 1, 1, 2, 50))

    def _repeat(self, data: bytearray) -> None:
        start = self._place(data)
        part = data[start : start + self._random.choice((1, 5, 40, 400))]
        room = min(20000 // (len(part) + 1), 2000)
        data[start:start] = part * self._random.choice((1, 2, room))

    def _splice(self, data: bytearray) -> None:
        other = self._random.choice(self._seeds)
        start = self._random.randrange(len(other) + 1)
        data[self._place(data) :] = other[start:]

    def _replace(self, data: bytearray, pattern: re.Pattern[bytes], replacement: Callable[[bytes], bytes]) -> None:
        start = self._place(data)
        found = pattern.search(data, start) or pattern.search(data)
        if found:
            data[found.start() : found.end()] = replacement(found.group())

    def _other_number(self, data: bytearray) -> None:
        self._replace(data, NUMBER, lambda _: self._random.choice(NUMBERS))

    def _other_word(self, data: bytearray) -> None:
        words = WORD.findall(self._random.choice(self._seeds)[:5000]) or [b"x"]
        self._replace(data, WORD, lambda _: self._random.choice(words))

    def _double_key(self, data: bytearray) -> None:
        self._replace(data, PAIR, lambda pair: pair + b", " + pair)

    def _other_value(self, data: bytearray) -> None:
        """Change a value of what is still JSON."""
        try:
            whole = json.loads(data) if len(data) < 20000 else None
        except (ValueError, RecursionError):
            return
        at: Any = whole
        while isinstance(at, dict | list) and at:
            key = self._random.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or self._random.random() < 0.2:
                self._change(at, key)
                data[:] = json.dumps(whole).encode()
                return
            at = at[key]

    def _change(self, holder: Any, key: Any) -> None:
        match self._random.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 2 if isinstance(holder, dict):
                holder[f"{key}x"] = holder[key]
            case 3 if isinstance(holder[key], int | float):
                holder[key] += self._random.choice((-1, 1, 0.5, 2**31))
            case 4:
                other = self._random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
                holder[key], holder[other] = holder[other], holder[key]
            case _:
                holder[key] = self._random.choice(VALUES)

    def _nest(self, data: bytearray) -> None:
        left, right = self._random.choice(TALL)
        depth = self._random.choice((3, 90, 250, 990, 1100, 5000, 100000))
        place = self._place(data)
        data[place:place] = left * depth + b"1" + right * depth * self._random.randrange(2)

    def _long(self, data: bytearray) -> None:
        unit = self._random.choice(
            (b"a", b"7", b" ", b"\n", b"[],", b'"x",', b"\\u00e9", b"- 1\n", b"1,", b"0F0,", b"#\n")
        )
        place = self._place(data)
        data[place:place] = unit * (self._random.choice((300, 5000, 60000, MOST_BYTES)) // len(unit))

    def _noise(self, data: bytearray) -> None:
        place = self._place(data)
        data[place:place] = self._random.randbytes(self._random.choice((1, 4, 200)))
