"""Listening addresses and network interfaces of a run: one address, and the interface needed, unless the user chose.

all ranks on this machine     the loopback interface, for gloo and NCCL: no port is reachable from outside
several machines, gloo        the interface that leads to MASTER_ADDR; gloo's default, that of the host's name, is
                              on many machines the loopback interface
several machines, NCCL        NCCL chooses

Address of a run's first machine, resolved before anything is started, so that errors are raised at once:

10.0.0.1:29500   node0:29500   [fd77::1]:29500

machine 0      has the address, and listens there only
the others     can resolve it
node0 resolves to loopback here (127.0.1.1 in /etc/hosts), which other machines cannot reach: so machine 0 uses its
only other address, and raises an error with a list if there are several
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
import sys
from pathlib import Path

from quintsched.errors import UsageError

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
BACKLOG = 4096
"""Pending connections that are kept: ranks may connect while torch is still imported."""

IPV6 = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""


def is_one_machine() -> bool:
    """Whether all ranks of the run are known to be on this machine."""
    return "WORLD_SIZE" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at a single address of a host, on a port, any free one for 0.

    Raises `OSError` where the port is taken, or the address is not this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def choose_interfaces() -> None:
    """Set the interfaces of gloo and NCCL in the environment; existing values stay."""
    alone = is_one_machine()
    interface = interface_of(LOOPBACK if alone else address_towards(os.environ["MASTER_ADDR"]))
    if interface is not None:
        os.environ.setdefault(GLOO, interface)
    if interface is not None and alone:
        os.environ.setdefault(NCCL, f"={interface}")


def require_interfaces() -> None:
    """Raise `UsageError` where the environment names an interface for gloo that this machine does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if name not in there:
            raise UsageError(
                f"{GLOO}={os.environ[GLOO]}: this machine has no network interface {name!r}; it has {', '.join(there)}"
            )


def address_towards(host: str) -> str | None:
    """Return this machine's source address for packets to a host; None where there is no route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return None


def own_addresses() -> list[str]:
    """Return the known addresses of this machine that others may reach: not the loopback's."""
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    found += [address for address, _ in _ipv6()]
    known = {address: ipaddress.ip_address(address) for address in found}
    return [text for text, address in known.items() if not address.is_loopback and not address.is_link_local]


def interface_of(address: str | None) -> str | None:
    """Return the name of the interface with an address; None where it is not known."""
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


_WRITTEN = re.compile(r"\[(?P<literal>[^\[\]]+)\]:(?P<port>\d{1,5})|(?P<host>[^\[\]]+):(?P<after>\d{1,5})")


def read_master(text: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT"; raises `UsageError` for anything else."""
    found = _WRITTEN.fullmatch(text)
    host, port = (found["literal"] or found["host"], int(found["port"] or found["after"])) if found else ("", 0)
    if not 0 < port < 2**16 or (":" in host and not _is_literal(host)):
        raise UsageError(f"--master {text!r}: give machine 0's address and a free port of it: HOST:PORT")
    return host, port


def own_address(host: str, said: str) -> str:
    """Return the address at which this machine, the first of the run, serves the others.

    `said` is the user's setting, for errors. Raises `UsageError` for an address that is not this machine's, or that
        others cannot reach.
    """
    found = _look_up(host, said)
    own = [address for address in found if _is_here(address)]
    others = own_addresses()
    named = ", ".join(others) or "none"
    if not own:
        raise UsageError(f"{said}: machine 0 has no address {found[0]}; give one that it has: {named}")
    reached = [address for address in own if not _is_loopback(address)]
    if reached or _means_loopback(host):
        return (reached or own)[0]
    others = [address for address in others if ":" not in address] or others
    if len(others) != 1:
        raise UsageError(
            f"{said}: on this machine {host} is {own[0]}, where no other machine can come (see /etc/hosts); "
            f"give the address that the others come to: {named}"
        )
    return others[0]


def require_elsewhere(host: str, said: str) -> None:
    """Raise `UsageError` where the first machine's name resolves to this machine, which is not the first."""
    found = _look_up(host, said)
    if all(map(_is_loopback, found)) and not _means_loopback(host):
        raise UsageError(
            f"{said}: on this machine {host} is {found[0]}, which is this machine itself (see /etc/hosts); "
            "give the address of machine 0"
        )


def _look_up(host: str, said: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{said}: the host {host!r} cannot be found: {why}; give the address of machine 0") from None
    return [str(address[0]) for *_, address in found]


def _is_here(address: str) -> bool:
    """Whether an address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _is_literal(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _means_loopback(host: str) -> bool:
    """Whether a host name stands for this machine alone."""
    return host == "localhost" or (_is_literal(host) and _is_loopback(host))
