"""A headless Chromium without the network, driven through its DevTools pipe by the standard library."""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe")
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed",
              "Network.requestWillBeSent")


class BrowserError(RuntimeError):
    """The browser ended, did not answer in time, or refused a command."""


def find_browser() -> str | None:
    """The path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One tab, `width` pixels wide. `complaints` holds what went wrong on the page that is open.

    Args:
        program: the path of Chromium.
        folder: an empty folder for its profile.
        timeout: seconds after which a command that has no answer raises BrowserError.
    """

    def __init__(self, program: str, folder: Path, *, width: int = 390, height: int = 844, timeout: float = 60) -> None:
        self.timeout = timeout
        self.complaints: list[str] = []
        self._buffer, self._answers, self._loaded, self._number = b"", dict[int, Any](), False, 0
        theirs_in, self._write = _pipe()
        self._read, theirs_out = _pipe()
        # Chromium reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
        actions = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                   *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2))]
        self._process = os.posix_spawn(program, [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
                                       dict(os.environ), file_actions=actions, setpgroup=0)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **arguments: Any) -> Any:
        """Send a command of the DevTools protocol, and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self._wait(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Open a page and wait until it has loaded; its complaints begin anew."""
        self.complaints.clear()
        self._loaded = False
        answer = self.call("Page.navigate", url=address)
        if "errorText" in answer:
            raise BrowserError(f"{address}: {answer['errorText']}")
        self._wait(lambda: self._loaded, address)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression on the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser and its processes."""
        os.close(self._write)
        os.close(self._read)
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.timeout
        while not done():
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"{what}: no answer within {self.timeout} s")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise BrowserError(f"{what}: the browser has ended")
            *messages, self._buffer = (self._buffer + part).split(b"\0")
            for message in messages:
                self._receive(json.loads(message))

    def _receive(self, message: dict[str, Any]) -> None:
        event, values = message.get("method"), message.get("params", {})
        if "id" in message:
            self._answers[message["id"]] = message
        elif event == "Page.loadEventFired":
            self._loaded = True
        elif event in COMPLAINTS and (text := _complaint(event, values)):
            self.complaints.append(text)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that the browser is started with."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _complaint(event: str, values: dict[str, Any]) -> str:
    """What an event says went wrong, or nothing."""
    if event == "Runtime.exceptionThrown":
        details = values["exceptionDetails"]
        return f"exception: {details.get('exception', {}).get('description', details['text'])}"
    if event == "Runtime.consoleAPICalled":
        texts = [str(value.get("value", value.get("description"))) for value in values["args"]]
        return f"console.{values['type']}: {' '.join(texts)}" if values["type"] in ("error", "assert") else ""
    if event == "Log.entryAdded":
        entry = values["entry"]
        return f"log: {entry['text']} {entry.get('url', '')}" if entry["level"] == "error" else ""
    if event == "Network.loadingFailed":
        return f"not loaded: {values['type']} {values['errorText']}"
    address = values["request"]["url"]
    return "" if address.startswith(("file:", "data:", "blob:", "about:")) else f"asks the network: {address}"
