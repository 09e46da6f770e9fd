"""Where a run listens: at one address, and on the interface that it needs, unless the user has said otherwise.

all ranks on this machine     the loopback interface, for gloo and NCCL: nobody outside reaches a port of the run
several machines, gloo        the interface that leads to MASTER_ADDR; gloo itself would take that of the host's
                              name, which on many machines is the loopback interface
several machines, NCCL        NCCL chooses
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from quintsched.errors import UsageError

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
BACKLOG = 4096
"""As many ranks may knock before they are answered: torch is imported meanwhile."""

IPV6 = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""


def is_one_machine() -> bool:
    """Whether all ranks of the run are known to be on this machine."""
    return "WORLD_SIZE" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at the one address of a host, on a port, any free one if 0.

    Raises `OSError` where the port is taken, or the address is not this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def choose_interfaces() -> None:
    """Put the interfaces into the environment, where gloo and NCCL read them; what is there already stays."""
    alone = is_one_machine()
    interface = interface_of(LOOPBACK if alone else address_towards(os.environ["MASTER_ADDR"]))
    if interface is not None:
        os.environ.setdefault(GLOO, interface)
    if interface is not None and alone:
        os.environ.setdefault(NCCL, f"={interface}")


def require_interfaces() -> None:
    """Raise `UsageError` where the user has named an interface for gloo that this machine does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if name not in there:
            raise UsageError(
                f"{GLOO}={os.environ[GLOO]}: this machine has no network interface {name!r}; it has {', '.join(there)}"
            )


def address_towards(host: str) -> str | None:
    """Return this machine's address, as a host sees it that it sends to; None where no way leads there."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return None


def own_addresses() -> list[str]:
    """Return the addresses of this machine that others may come to, as far as they are known: not the loopback's."""
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    found += [address for address, _ in _ipv6()]
    known = {address: ipaddress.ip_address(address) for address in found}
    return [text for text, address in known.items() if not address.is_loopback and not address.is_link_local]


def interface_of(address: str | None) -> str | None:
    """Return the name of the interface that has an address; None where that is not known."""
    names = [name for _, name in socket.if_nameindex()]
    if address in (LOOPBACK, "::1"):
        return next((name for name in ("lo", "lo0") if name in names), None)
    if address is None or ":" in address:
        return next((name for own, name in _ipv6() if own == address), None)
    return next((name for name in names if _address_of(name) == address), None)


def _address_of(name: str) -> str | None:
    """Return the IPv4 address of an interface."""
    if sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        reply = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return None


def _ipv6() -> list[tuple[str, str]]:
    """Return the IPv6 addresses of this machine, each with its interface."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in IPV6.read_text().splitlines()]
        return [(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])), line[5]) for line in lines]
    return []
