"""A headless Chromium, driven by the W3C WebDriver protocol: chromedriver answers JSON over HTTP on this machine."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""Programs, and Debian's packages that bring them."""

_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Browser:
    """One window.

    Args:
        folder: for the profile and the driver's log.
    """

    def __init__(self, folder: Path):
        self._log = open(folder / "chromedriver.log", "w+")  # noqa: SIM115 (open as long as the driver works)
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._address = f"http://127.0.0.1:{self._port()}/session"
            options = {"args": [*_OPTIONS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._address += f"/{made['sessionId']}"
        except BaseException:
            self._driver.kill()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception) -> None:
        self._ask("DELETE", "")
        self._driver.terminate()
        self._driver.wait(10)
        self._log.close()

    def open(self, page: Path, width: int) -> None:
        """Show a file in a window so wide."""
        self._ask("POST", "/window/rect", {"width": width, "height": 900})
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> object:
        """Run JavaScript in the page and return what it returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """Return what the browser has written to its console since the last look."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        """Return what is to be seen, as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def _ask(self, method: str, path: str, body: dict | None = None) -> object:
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data, head, method=method)  # noqa: S310 (this machine)
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.loads(answer.read())["value"]

    def _port(self) -> int:
        end = time.monotonic() + 30
        while time.monotonic() < end and self._driver.poll() is None:
            said = Path(self._log.name).read_text()
            if "started successfully on port " in said:
                return int(said.split("started successfully on port ")[1].split(".")[0])
            time.sleep(0.1)
        raise RuntimeError(f"chromedriver did not start: {Path(self._log.name).read_text()}")


def missing() -> list[str]:
    """Return Debian's packages that a browser here lacks."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
