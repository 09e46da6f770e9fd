"""Several hosts on one machine: namespaces of networks and processes, with a switch between them.

host 0 (10.97.0.1) ── veth ──┐
host 1 (10.97.0.2) ── veth ──┤ bridge, in a namespace of its own
…                            │
"""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REFUSALS = ("not permitted", "permission denied", "not supported", "unknown device type", "kind is unknown")
"""Errors of `ip`, `tc` and `unshare` for missing permissions or support by the system."""


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


_ip, _tc = functools.partial(_call, "ip"), functools.partial(_call, "tc")


def _pids(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _remove(name: str) -> None:
    """End all that runs in a namespace, and take it away."""
    for pid in _pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _refusal(error: subprocess.CalledProcessError) -> str:
    """Return the words of a system that does not allow or does not know something; what else went wrong is raised."""
    if not any(word in error.stderr.lower() for word in REFUSALS):
        raise error
    return str(error.stderr.strip())


_MADE = itertools.count()


def _letters(number: int) -> str:
    """Return a number in letters, of which names of hosts have no others: a, b, … g, ba, …"""
    return ("" if number < 7 else _letters(number // 7)) + "abcdefg"[number % 7]


class Hosts:
    """So many hosts; `addresses` are theirs, and what is started there runs in `folder`."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        own = f"qs{os.getpid()}{_letters(next(_MADE))}"
        self.names = [f"{own}h{number}" for number in range(count)]
        self.addresses = [f"10.97.0.{number + 1}" for number in range(count)]
        self._switch = f"{own}sw"
        self._started: list[subprocess.Popen[str]] = []
        self._inits: list[int] = []

    def sweep(self) -> None:
        """Take away what runs have left that were killed."""
        done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
        for name in re.findall(r"^(qs\d+[a-g]*(?:h\d+|sw))\b", done.stdout, re.MULTILINE):
            owner = int(re.findall(r"\d+", name)[0])
            if not Path(f"/proc/{owner}").exists():
                _remove(name)

    def connect(self) -> None:
        """Make the namespaces; raises `CalledProcessError` where that may not be done."""
        lines = [f"{address} host{number}" for number, address in enumerate(self.addresses)]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", f"to{number}", "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"to{number}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            self._inits.append(self._boot(number))

    def _boot(self, number: int) -> int:
        """Start the process of a host that is there as long as the host is, and return its number."""
        name = self.names[number]
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        known = f"mount --bind {self._folder / 'hosts'} /etc/hosts"
        does = f"hostname host{number} && {known} && exec sleep infinity"
        words = ["ip", "netns", "exec", name, *unshare, "sh", "-c", does]
        init = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._started.append(init)
        for _ in range(200):
            for pid in _pids(name):
                with contextlib.suppress(FileNotFoundError):  # one of those that came before it
                    if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                        return pid
            if init.poll() is not None:
                break
            time.sleep(0.05)
        said = init.communicate()[1] if init.poll() is not None else "it has no process of its own after 10 s"
        raise subprocess.CalledProcessError(init.poll() or 1, words, stderr=said)

    def cut(self, number: int, *, healed: bool = False) -> None:
        """Take the wire of a host out of the switch, or put it back."""
        _ip("-n", self._switch, "link", "set", f"to{number}", "up" if healed else "down")

    def slow(self, number: int, *, kbit: int = 0) -> None:
        """Let a host send so little a second, or as much as it can again; skips the test where that is not possible."""
        if not kbit:
            _tc("-n", self.names[number], "qdisc", "del", "dev", "wire", "root")
            return
        if shutil.which("tc") is None:
            pytest.skip("a link cannot be slowed here: tc is not installed")
        limit = ["rate", f"{kbit}kbit", "burst", "16kbit", "latency", "1s"]
        try:
            _tc("-n", self.names[number], "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"a link cannot be slowed here: {_refusal(error)}")

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to what a process has started on its host."""
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), number)

    def start(self, number: int, *command: object) -> subprocess.Popen[str]:
        """Start a command on a host."""
        enter = ["nsenter", "-t", self._inits[number], "-n", "-u", "-p", "-m", f"--wd={self._folder}"]
        words = [*map(str, (*enter, *command))]
        self._started.append(
            subprocess.Popen(
                words,
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(Path.cwd())},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self._started[-1]

    def pids(self, *numbers: int) -> list[int]:
        """Return the processes that were started on some of the hosts, or on all."""
        names = [self.names[number] for number in numbers] or self.names
        booted = {*self._inits, *(process.pid for process in self._started)}
        return [pid for name in names for pid in _pids(name) if pid not in booted]

    def close(self) -> None:
        """End all that runs there, and take the hosts away."""
        for name in (*self.names, self._switch):
            _remove(name)
        for process in self._started:
            process.communicate()


@functools.cache
def why_no_hosts() -> str | None:
    """Return why no hosts can be made on this machine; None: they can."""
    if not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need what is not installed: {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        made = Hosts(1, Path(folder))
        try:
            made.connect()
        except subprocess.CalledProcessError as error:
            return f"network namespaces may not be made here: {_refusal(error)}"
        finally:
            made.close()
    return None


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Make hosts for a test, which is skipped where this machine does not let us."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason.strip())
    made = Hosts(count, folder)
    try:
        made.sweep()
        made.connect()
        yield made
    finally:
        made.close()
