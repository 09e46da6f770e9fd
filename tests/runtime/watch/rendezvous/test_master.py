"""Address of a run's first machine, and the error at once for one that cannot be right."""

from __future__ import annotations

import socket

import pytest

from quintsched.errors import UsageError
from quintsched.runtime.watch.rendezvous import addresses
from quintsched.runtime.watch.rendezvous.addresses import own_address, read_master, require_elsewhere
from quintsched.runtime.watch.rendezvous.rendezvous_store import connect_to

SAID = "--master it"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name; this machine has all that begin with 127. or 10.0.0.1, and these are its own."""
    known: dict[str, list[str]] = {"own": ["10.0.0.1", "fd77::1"]}

    def look_up(host: str, _: object, **__: object) -> list[tuple[object, ...]]:
        if host in known or host[0].isdigit() or ":" in host:
            return [(0, 0, 0, "", (address, 0)) for address in known.get(host, [host])]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "own_addresses", lambda: known["own"])
    monkeypatch.setattr(addresses, "_is_here", lambda address: address.startswith("127.") or address in known["own"])
    return known


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-0.x:1", ("node-0.x", 1)),
        ("[fd77::1]:29500", ("fd77::1", 29500)),
        ("fd77::1:29500", ("fd77::1", 29500)),
    ],
)
def test_an_address_is_read(text: str, found: tuple[str, int]) -> None:
    assert read_master(text) == found


@pytest.mark.parametrize(
    "text",
    ["", "node0", ":29500", "node0:", "node0:x", "node0:0", "node0:65536", "fd77::1", "[fd77::1]", "a:b:1", "[a]"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--master '.*': give machine 0's address and a free port of it: HOST:PORT$"):
        read_master(text)


def test_machine_0_listens_at_its_own_address(names: dict[str, list[str]]) -> None:
    names |= {"node0": ["10.0.0.1"], "both": ["127.0.1.1", "fd77::1"], "localhost": ["127.0.0.1"]}
    assert own_address("node0", SAID) == "10.0.0.1"
    assert own_address("10.0.0.1", SAID) == "10.0.0.1"
    assert own_address("fd77::1", SAID) == own_address("both", SAID) == "fd77::1"
    assert own_address("127.0.0.1", SAID) == own_address("localhost", SAID) == "127.0.0.1"


def test_a_name_of_the_loopback_is_the_only_other_address(names: dict[str, list[str]]) -> None:
    names["node0"] = ["127.0.1.1"]
    assert own_address("node0", SAID) == "10.0.0.1"
    for own, listed in (([], "none"), (["10.0.0.1", "172.17.0.1"], "10.0.0.1, 172.17.0.1")):
        names["own"] = own
        with pytest.raises(UsageError, match=rf"node0 is 127\.0\.1\.1, where no other machine can come .*: {listed}$"):
            own_address("node0", SAID)


def test_an_address_of_another_machine_is_refused(names: dict[str, list[str]]) -> None:
    with pytest.raises(
        UsageError, match=r"^--master it: machine 0 has no address 10\.0\.0\.9; .* has: 10\.0\.0\.1, fd77"
    ):
        own_address("10.0.0.9", SAID)


def test_a_name_that_nobody_knows_is_refused_everywhere(names: dict[str, list[str]]) -> None:
    for look in (own_address, require_elsewhere):
        with pytest.raises(
            UsageError, match=r"^--master it: the host 'nosuch' cannot be found: Name or service not known"
        ):
            look("nosuch", SAID)


def test_another_machine_does_not_come_to_itself(names: dict[str, list[str]]) -> None:
    names |= {"node0": ["10.0.0.1"], "node1": ["127.0.1.1"], "localhost": ["127.0.0.1"]}
    for host in ("node0", "10.0.0.9", "localhost", "127.0.0.1", "fd77::1"):
        require_elsewhere(host, SAID)
    with pytest.raises(
        UsageError, match=r"node1 is 127\.0\.1\.1, which is this machine itself .*address of machine 0$"
    ):
        require_elsewhere("node1", SAID)


def test_who_waits_for_a_store_that_never_comes_says_so_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RuntimeError, match=f"^nobody listens at 127.0.0.1, port {port}: Connection refused$"):
        connect_to("127.0.0.1", port, 0.2)
    assert capfd.readouterr().err == ""
