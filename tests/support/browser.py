"""A real Chromium for tests, spoken to over a pipe by its own debugging protocol.

No driver and no socket: the browser reads commands from file descriptor 3 and writes answers and
events to 4, each ended by a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMMAND = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "no Chromium here: apt install chromium"

_TROUBLE = ("error", "warning", "assert")
_START = (
    "import os, sys\n"
    "os.dup2(int(sys.argv[1]), 3)\n"
    "os.dup2(int(sys.argv[2]), 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """One tab, and everything that it said and asked for."""

    def __init__(self, command: int, answer: int) -> None:
        self._command, self._answer = command, answer
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """Errors, warnings and exceptions of the console."""
        self.requests: list[str] = []

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                result: dict[str, Any] = found["result"]
                return result
            self._keep(found)

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("document.documentElement?.dataset.drawn === ''")

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"not in {seconds} s: {expression}; {self.messages}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str) -> None:
        """A key by its name: ``+``, ``Enter``, ``ArrowLeft``."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13}.get(key, 0)
        values = {"key": key, "text": text, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answer], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {seconds} s"
            part = os.read(self._answer, 1 << 20)
            assert part, "the browser is gone"
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _keep(self, event: dict[str, Any]) -> None:
        what, values = event.get("method"), event.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(values["exceptionDetails"]))
        elif what == "Log.entryAdded":
            self.messages.append(f"{values['entry']['level']}: {values['entry']['text']}")
        elif what == "Runtime.consoleAPICalled" and values["type"] in _TROUBLE:
            self.messages.append(f"{values['type']}: {json.dumps(values['args'])}")


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile; it ends with the block."""
    assert COMMAND is not None, MISSING
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    options = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
        "--disable-background-networking --no-first-run --remote-debugging-pipe"
    )
    command = [COMMAND, *options.split(), f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(to_browser), str(to_us), *command],
        pass_fds=(to_browser, to_us),
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
    )
    os.close(to_browser)
    os.close(to_us)
    try:
        browser = Browser(from_us, from_browser)
        browser.attach()
        yield browser
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        os.close(from_us)
        os.close(from_browser)
