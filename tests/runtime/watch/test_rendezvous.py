"""Ranks and machines that find each other: addresses, the first machine, interfaces, and attempts that meet."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from quintsched.errors import StallError, UsageError
from quintsched.runtime.watch.rendezvous import network_addresses
from quintsched.runtime.watch.rendezvous.network_addresses import (
    GLOO,
    LOOPBACK,
    NCCL,
    choose_interfaces,
    interface_of,
    listen,
    own_address,
    read_master,
    require_elsewhere,
    require_interfaces,
)
from quintsched.runtime.watch.rendezvous.rendezvous_store import StartAttempt, connect_to, meet


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (GLOO, NCCL, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # so that what the call sets is taken back
        monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    return monkeypatch


def test_one_machine_uses_the_loopback_interface(one_machine: pytest.MonkeyPatch) -> None:
    choose_interfaces()
    loopback = interface_of(LOOPBACK)
    assert loopback in ("lo", "lo0")
    assert (os.environ[GLOO], os.environ[NCCL]) == (loopback, f"={loopback}")


def test_a_port_is_open_at_one_address_only() -> None:
    with listen(LOOPBACK) as here:
        assert here.getsockname()[0] == LOOPBACK
        with pytest.raises(OSError, match="in use"):
            listen(LOOPBACK, here.getsockname()[1])
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        listen("203.0.113.9")


SAID, OWN = "--master it", ["10.0.0.1", "fd77::1"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name; this machine has all that begin with 127. or 10.0.0.1, and these are its own."""
    known = {"own": OWN, "node0": ["10.0.0.1"], "both": ["127.0.1.1", "fd77::1"]}
    known |= {"localhost": ["127.0.0.1"], "alias": ["127.0.1.1"]}

    def look_up(host: str, _: object, **__: object) -> list[tuple[object, ...]]:
        if host in known or host[0].isdigit() or ":" in host:
            return [(0, 0, 0, "", (address, 0)) for address in known.get(host, [host])]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(network_addresses, "own_addresses", lambda: known["own"])
    monkeypatch.setattr(
        network_addresses, "_is_here", lambda address: address.startswith("127.") or address in known["own"]
    )
    return known


def test_an_address_is_read_and_what_is_none_is_refused() -> None:
    for text, found in (
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-0.x:1", ("node-0.x", 1)),
        ("[fd77::1]:29500", ("fd77::1", 29500)),
        ("fd77::1:29500", ("fd77::1", 29500)),
    ):
        assert read_master(text) == found
    words = r"^--master '.*': give machine 0's address and a free port of it: HOST:PORT$"
    for text in ("", "node0", ":29500", "node0:", "node0:x", "node0:0", "node0:65536", "fd77::1", "a:b:1", "[a]"):
        with pytest.raises(UsageError, match=words):
            read_master(text)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("host", "address"),
    [
        *(("node0", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd77::1", "fd77::1"), ("both", "fd77::1")),
        *(("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")),
        ("alias", "10.0.0.1"),  # the only address that is not the loopback's
    ],
)
def test_machine_0_listens_at_its_own_address(host: str, address: str) -> None:
    assert own_address(host, SAID) == address


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("host", ["node0", "10.0.0.9", "localhost", "127.0.0.1", "fd77::1"])
def test_another_machine_looks_for_machine_0_there(host: str) -> None:
    require_elsewhere(host, SAID)


NO_SUCH = "^--master it: the host 'nosuch' cannot be found: Name or service not known"
NO_MACHINE_COMES = r"alias is 127\.0\.1\.1, where no other machine can come .*: "


@pytest.mark.parametrize(
    ("look", "host", "own", "words"),
    [
        (
            own_address,
            "10.0.0.9",
            OWN,
            r"^--master it: machine 0 has no address 10\.0\.0\.9; .* has: 10\.0\.0\.1, fd77",
        ),
        *((look, "nosuch", OWN, NO_SUCH) for look in (own_address, require_elsewhere)),
        (own_address, "alias", [], NO_MACHINE_COMES + "none$"),
        (own_address, "alias", ["10.0.0.1", "172.17.0.1"], NO_MACHINE_COMES + "10.0.0.1, 172.17.0.1$"),
        (
            require_elsewhere,
            "alias",
            OWN,
            r"alias is 127\.0\.1\.1, which is this machine itself .*address of machine 0$",
        ),
    ],
)
def test_an_address_where_machine_0_cannot_be_is_refused(look, host, own, words, names):
    names["own"] = own
    with pytest.raises(UsageError, match=words):
        look(host, SAID)


def new_store() -> dist.Store:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=20))
    return store


def all_meet(store: dist.Store, ranks: int, order: list[int] | None = None) -> list[StartAttempt]:
    with ThreadPoolExecutor(ranks) as pool:
        made = {rank: pool.submit(meet, store, rank, ranks, 20.0) for rank in order or range(ranks)}
        return [made[rank].result() for rank in range(ranks)]


def test_attempts_are_numbered_and_have_keys_of_their_own() -> None:
    store = new_store()
    for number in (1, 2, 3):
        attempts = all_meet(store, 3, order=[2, 0, 1] if number == 2 else None)
        assert [attempt.number for attempt in attempts] == [number] * 3
        assert not attempts[0].store.check(["address"])
        attempts[0].store.set("address", f"of attempt {number}")
        assert attempts[2].store.get("address").decode() == f"of attempt {number}"


def test_who_does_not_come_is_named() -> None:
    store = new_store()
    with ThreadPoolExecutor(2) as pool:
        there = [pool.submit(meet, store, rank, 4, 20.0) for rank in (1,)]
        with pytest.raises(StallError, match=r"waiting 0\.2 s for all ranks to come together: ranks 2 and 3 did not"):
            meet(store, 0, 4, 0.2)
        there[0].result()
    store = new_store()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(StallError, match="rank 0 did not"):
        meet(store, 1, 2, 0.2)


def test_an_interface_that_is_not_there_is_refused_at_once(one_machine: pytest.MonkeyPatch) -> None:
    require_interfaces()
    loopback = interface_of(LOOPBACK)
    one_machine.setenv(GLOO, f"{loopback}")
    require_interfaces()
    one_machine.setenv(GLOO, f"{loopback},nosuch0")
    with pytest.raises(UsageError, match=f"has no network interface 'nosuch0'; it has .*{loopback}"):
        require_interfaces()


def test_who_waits_for_a_store_that_never_comes_says_so_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RuntimeError, match=f"^nobody listens at 127.0.0.1, port {port}: Connection refused$"):
        connect_to("127.0.0.1", port, 0.2)
    assert capfd.readouterr().err == ""
