"""Frames on the watch's connections: bounded, for holders of the key, and no malformed one is accepted."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintsched.runtime.watch.monitor_sockets import (
    FRAME_HEAD,
    JSON,
    MOST_FRAME_BYTES,
    MOST_OF_STRANGERS,
    PLAN,
    FrameError,
    FrameReader,
    answer,
    challenge,
    is_answer,
    json_frame,
    message_of,
    plan_frame,
    plan_of,
)


def reader() -> FrameReader:
    made = FrameReader()
    made.is_known = True
    return made


@given(st.lists(st.integers(1, 50)), st.text())
def test_frames_come_whole_however_they_are_cut(cuts: list[int], text: str) -> None:
    sent = json_frame({"error": text}) + plan_frame(3, text) + json_frame({})
    kept, found = reader(), []
    for cut in [*cuts, len(sent)]:
        part, sent = sent[:cut], sent[cut:]
        found += kept.feed(part)
    assert [kind for kind, _ in found] == [JSON, PLAN, JSON]
    assert message_of(found[0][1]) == {"error": text}
    assert plan_of(found[1][1]) == (3, text.encode())


def test_a_length_is_refused_before_it_is_read_and_strangers_may_say_little() -> None:
    for made, kind, length in (
        (reader, JSON, MOST_FRAME_BYTES[JSON] + 1),
        (reader, PLAN, MOST_FRAME_BYTES[PLAN] + 1),
        (reader, b"X", 1),
        (FrameReader, JSON, MOST_OF_STRANGERS + 1),
        (FrameReader, PLAN, 1),
    ):
        with pytest.raises(FrameError):
            list(made().feed(FRAME_HEAD.pack(kind, length)))


def test_what_is_no_message_or_no_plan_is_refused() -> None:
    cut = struct.pack(">I", 1) + zlib.compress(b"x")[:-1]
    for payload in (b"", b"[]", b"null", b"{", b"\xff", b"[" * 50_000):
        with pytest.raises(FrameError):
            message_of(payload)
    for payload in (b"", b"\0\0\0", b"\0\0\0\1nothing", cut):
        with pytest.raises(FrameError):
            plan_of(payload)


def test_only_who_knows_the_key_can_answer() -> None:
    asked = challenge()
    assert is_answer(answer("key", asked, "rank"), "key", asked, "rank")
    wrong = [("other", asked, "rank"), ("key", asked, "hub"), ("key", challenge(), "rank")]
    for odd in (None, 5, "", "ü", asked, *(answer(*one) for one in wrong)):
        assert not is_answer(odd, "key", asked, "rank")
