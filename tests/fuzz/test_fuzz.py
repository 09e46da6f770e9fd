"""Fuzzing of files: each is read or refused with a message; a sample, `benchmarks/fuzz.py` feeds a million."""

import time
from pathlib import Path

import pytest

from quintsched.errors import InputError, UsageError
from quintsched.files.strictyaml import MOST_BYTES, parse_yaml
from quintsched.runtime.settings.job_file import load_job

from .harness import feed, limited_memory
from .mutator import Mutator
from .readers import READERS

DAILY = 50


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", READERS)
def test_broken_files_are_refused_in_words(name: str) -> None:
    reader = READERS[name]
    seeds = reader.seeds()
    for seed in seeds:
        assert feed(reader.read, seed).kind != "fault", name
    assert any(feed(reader.read, seed).kind == "good" for seed in seeds)
    mutator = Mutator(seeds, 1, stays_json=reader.stays_json)
    with limited_memory():
        for number in range(DAILY // 5 if reader.stays_json else DAILY):
            data = mutator.make()
            found = feed(reader.read, data)
            assert found.kind != "fault", f"input {number} of {name}, {len(data)} bytes: {found.words}"


def test_the_harness_sees_every_kind_of_fault() -> None:
    def raises(_: bytes) -> None:
        raise KeyError("x")

    def talks(_: bytes) -> None:
        raise InputError("x" * 10**6)

    def sleeps(_: bytes) -> None:
        began = time.process_time()
        while time.process_time() < began + 1.02:
            pass

    def eats(_: bytes) -> None:
        bytearray(2**30)

    def refuses(_: bytes) -> None:
        raise InputError("no")

    with limited_memory():
        kinds = [feed(read, b"").kind for read in (raises, talks, sleeps, eats, refuses, len)]
    assert kinds == ["fault"] * 4 + ["refused", "good"]


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (LAUGHS, "line 16, column 6: aliases stand for too much"),
        ("a: &a [1, *a]", "line 1, column 4: an alias lies within what it stands for"),
        ("a: &a {b: *a}", "an alias lies within what it stands for"),
        ("[" * 20000, "nested too deeply"),
        ("- " * 20000, "nested too deeply"),
        ("- 1\n" * 20000, "more than 20000 tokens"),
        ("#\n" * MOST_BYTES, f"it has {2 * MOST_BYTES} bytes, more than the {MOST_BYTES} that are read"),
    ],
)
def test_yaml_that_stands_for_much_is_refused_at_once(text: str, fault: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError) as refused:
        parse_yaml(text, "job.yaml")
    assert fault in str(refused.value)
    assert time.process_time() - began < 1.5


def test_a_message_about_long_settings_is_short(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    many = "\n".join(f"  key{number}: 1" for number in range(2000))
    path.write_text(f"train:\n{many}\nparallel: {{mesh: '{'x' * 90000}'}}\ndata: {{{'y' * 1000}: 1}}\n")
    with pytest.raises(UsageError) as refused:
        load_job(path)
    assert len(str(refused.value)) < 5000
    assert str(refused.value).endswith("more")
    assert "train.key0: unknown key" in str(refused.value)
