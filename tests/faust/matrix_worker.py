"""Starts a worker of the matrix as a process of its own and follows what it tells."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from matrix_app import Case

APP = Path(__file__).with_name("matrix_app.py")
STOP_TIMEOUT_S = 30.0


class Worker:
    """One Faust worker; a context manager that kills what is left of it on exit."""

    def __init__(self, case: Case, log: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(APP), "worker", "--loglevel", "info", "--without-web"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=case.environment(),
                text=True,
            )
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def until(self, holds: Callable[[dict[str, Any]], bool], *, timeout_s: float = 60.0) -> float:
        """Wait until the newest tick fits; seconds that it took. Fails if it never does."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            if self.ticks and holds(self.ticks[-1]):
                return time.monotonic() - begin
            assert self._process.poll() is None, f"the worker ended: {self._errors()}"
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s; last: {self.ticks[-1:]}; {self._errors()}")

    @property
    def ticks(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "tick"]

    @property
    def last(self) -> dict[str, Any]:
        return self.ticks[-1]

    def stop(self) -> float:
        """SIGTERM; seconds that it took to end."""
        begin = time.monotonic()
        self._process.terminate()
        assert self._process.wait(STOP_TIMEOUT_S) == 0, self._errors()
        return time.monotonic() - begin

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def _errors(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if "ERROR" in line or "Error" in line][-8:])
