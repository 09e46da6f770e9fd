"""Chromium without a window, driven over its debugging pipe: no driver, no port, no network."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.viz import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IN_CHROMIUM = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
FLAGS += ("--remote-debugging-pipe", "--hide-scrollbars")

READY = """new Promise((go) => {
  const look = () => document.body?.dataset.ready === 'all' ? go(1) : setTimeout(look, 20);
  look() })"""


PAINTED = READY.replace("dataset.ready === 'all'", "dataset.painted").replace("20)", "2)")


class Page:
    """One tab; `evaluate` returns the value of an expression, and raises if it throws."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, *, session: bool = True, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session and session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._reading, 2**20)
            text, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:2000])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def open(self, path: Path, fragment: str = "", *, width: int = 1440, height: int = 820) -> float:
        """Open a page and wait until all of it is there; return the CPU time until it was painted."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url="about:blank")  # another fragment alone loads nothing
        before = self.cpu_s()
        self._ask("Page.navigate", url=path.as_uri() + fragment)
        self.evaluate(PAINTED)
        painted = self.cpu_s() - before
        self.settle()
        return painted

    def settle(self) -> None:
        """Wait until the page has computed all that it shows."""
        self.evaluate(READY)

    def evaluate(self, expression: str) -> Any:
        found = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=1)

    def key(self, name: str, *, shift: bool = False, control: bool = False) -> None:
        held = {"key": name, "modifiers": 8 * shift + 2 * control}
        letter = "\r" if name == "Enter" else name
        text = {"text": letter} if len(letter) == 1 and not control else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **held, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **held)
        self.settle()

    def cpu_s(self) -> float:
        """Return the CPU time of all processes of the browser so far."""
        processes = self._ask("SystemInfo.getProcessInfo", session=False)["processInfo"]
        return float(sum(process["cpuTime"] for process in processes))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with a profile in `folder`, and end it."""
    (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()
    started = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    command = ["bash", "-c", started, "sh", CHROMIUM or "", *FLAGS, f"--user-data-dir={folder}"]
    with subprocess.Popen(
        command, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as it:
        os.close(from_us)
        os.close(to_us)
        try:
            yield Page(from_it, to_it)
        finally:
            it.terminate()
            os.close(to_it)
            os.close(from_it)


def opened(page: Page, simulation: qs.Simulation, path: Path) -> Page:
    """Write the page of a simulation, and open it."""
    render(simulation, path)
    page.open(path)
    return page


DROP = """(async () => { const files = Object.entries(FILES).map(([name, text]) => new File([text], name));
  const event = new Event('drop'); event.dataTransfer = { files }; dispatchEvent(event);
  await new Promise((go) => setTimeout(go, 100)) })()"""


def drop(page: Page, files: dict[str, str]) -> None:
    """Drop files on the page, and wait until it has read them."""
    page.evaluate(DROP.replace("FILES", json.dumps(files)))
    page.settle()
