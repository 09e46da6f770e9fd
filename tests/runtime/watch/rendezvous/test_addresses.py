"""Addresses that a run listens on, and interfaces that the libraries are given."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from quintsched.errors import UsageError
from quintsched.runtime.watch.rendezvous.addresses import (
    GLOO,
    LOOPBACK,
    NCCL,
    address_towards,
    choose_interfaces,
    interface_of,
    listen,
    own_addresses,
    require_interfaces,
)
from quintsched.runtime.watch.rendezvous.rendezvous_store import open_store


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


def test_what_the_user_has_set_stays(one_machine: pytest.MonkeyPatch) -> None:
    one_machine.setenv(GLOO, "eth7")
    one_machine.setenv(NCCL, "ib0")
    choose_interfaces()
    assert (os.environ[GLOO], os.environ[NCCL]) == ("eth7", "ib0")


def test_several_machines_take_the_interface_that_leads_to_the_first(one_machine: pytest.MonkeyPatch) -> None:
    one_machine.setenv("LOCAL_WORLD_SIZE", "1")
    choose_interfaces()  # the way to 127.0.0.1 is the loopback interface
    assert os.environ[GLOO] == interface_of(LOOPBACK)
    assert NCCL not in os.environ
    assert address_towards(LOOPBACK) == LOOPBACK
    assert address_towards("no.such.host.invalid") is None
    assert interface_of("203.0.113.9") is None
    assert interface_of(None) is None


def test_a_port_is_open_at_one_address_only() -> None:
    with listen(LOOPBACK) as here:
        assert here.getsockname()[0] == LOOPBACK
        with pytest.raises(OSError, match="in use"):
            listen(LOOPBACK, here.getsockname()[1])
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        listen("203.0.113.9")


def test_own_addresses_are_those_that_others_may_come_to() -> None:
    found = own_addresses()
    assert LOOPBACK not in found
    assert "::1" not in found
    for address in found:
        with listen(address) as here:
            assert here.getsockname()[0] == address
        assert interface_of(address) in [name for _, name in socket.if_nameindex()]


def test_an_interface_that_is_not_there_is_refused_at_once(one_machine: pytest.MonkeyPatch) -> None:
    require_interfaces()
    loopback = interface_of(LOOPBACK)
    one_machine.setenv(GLOO, f"{loopback}")
    require_interfaces()
    one_machine.setenv(GLOO, f"{loopback},nosuch0")
    with pytest.raises(UsageError, match=f"has no network interface 'nosuch0'; it has .*{loopback}"):
        require_interfaces()


def test_ranks_without_a_launcher_share_the_store_of_rank_0(one_machine: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    one_machine.setenv("MASTER_ADDR", "203.0.113.9")  # another name of this machine: nobody has to find it
    one_machine.setenv("MASTER_PORT", str(port))
    one_machine.setenv("RANK", "0")
    mine = open_store(10)
    one_machine.setenv("RANK", "1")
    threading.Timer(0.1, lambda: mine.set("said", "by rank 0")).start()
    assert open_store(10).get("said") == b"by rank 0"
