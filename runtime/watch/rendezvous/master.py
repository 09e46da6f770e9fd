"""Which address a run's first machine has: looked up before anything is started, so that what is wrong is said at once.

10.0.0.1:29500   node0:29500   [fd77::1]:29500

machine 0      has the address, and listens there and nowhere else
the others     can look it up
node0 is the loopback interface here (127.0.1.1 in /etc/hosts): no other machine can come there, so that machine 0
takes its only other address, and says which ones there are if there are several
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

from quintsched.errors import UsageError

from .addresses import own_addresses

_WRITTEN = re.compile(r"\[(?P<literal>[^\[\]]+)\]:(?P<port>\d{1,5})|(?P<host>[^\[\]]+):(?P<after>\d{1,5})")


def read_master(text: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT"; raises `UsageError` for anything else."""
    found = _WRITTEN.fullmatch(text)
    host, port = (found["literal"] or found["host"], int(found["port"] or found["after"])) if found else ("", 0)
    if not 0 < port < 2**16 or (":" in host and not _is_literal(host)):
        raise UsageError(f"--master {text!r}: give machine 0's address and a free port of it: HOST:PORT")
    return host, port


def own_address(host: str, said: str) -> str:
    """Return the address of this machine, the first of the run, at which it serves the others.

    `said` is what the user wrote. Raises `UsageError` where this machine has no such address, or nobody could come.
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
    """Raise `UsageError` where this machine, not the first of the run, does not find the first one by its name."""
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
    """Whether an address is one of this machine."""
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
    """Whether somebody who writes this means this machine alone."""
    return host == "localhost" or (_is_literal(host) and _is_loopback(host))
