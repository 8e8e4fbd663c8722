"""Child processes of one command: started, watched, started again, and ended with it."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
TAIL_LINES = 12


class ChildError(RuntimeError):
    """A child that did not become ready; the text holds the end of its log."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when ``parent`` does; ends it now if that happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(f"the process that started this one ({parent}) has ended")


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Last lines of a log, or why there are none."""
    try:
        text = log.read_text(errors="replace")
    except OSError as e:
        return f"({e})"
    return "\n".join(text.splitlines()[-lines:]) or "(nothing was logged)"


@dataclass(slots=True)
class Child:
    """One program and its log; a ready file, when given, is removed at start and awaited."""

    name: str
    command: Sequence[str]
    log: Path
    ready_file: Path | None = None
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None
    _retry_at: float = 0.0
    _backoff_s: float = field(default=FIRST_BACKOFF_S)

    def start(self) -> None:
        """Start the program in a process group of its own, so that Ctrl-C reaches only us."""
        if self.ready_file:
            self.ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the program runs."""
        return self.process is not None and self.process.poll() is None

    def wait_ready(self, timeout_s: float) -> str:
        """Content of the ready file once it is there. Raises :class:`ChildError`."""
        if self.ready_file is None:
            return ""
        deadline = time.monotonic() + timeout_s
        while not self.ready_file.exists():
            if not self.running:
                status = self.process.returncode if self.process else None
                raise ChildError(f"{self.name} ended with status {status}:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise ChildError(
                    f"{self.name} was not ready within {timeout_s:.0f} s:\n{tail(self.log)}"
                )
            time.sleep(0.05)
        return self.ready_file.read_text()

    def stop(self, timeout_s: float) -> None:
        """End the program: SIGTERM, then SIGKILL when it takes longer than ``timeout_s``."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %.0f s and was killed", self.name, timeout_s)
            self.process.kill()
            self.process.wait()

    def revive(self, now_s: float) -> bool:
        """Start the program again if it has ended and its backoff is over; True if it did."""
        if self.running:
            return False
        if self._retry_at == 0.0:
            status = self.process.returncode if self.process else None
            logger.warning("%s ended with status %s:\n%s", self.name, status, tail(self.log))
            self._retry_at = now_s + self._backoff_s
            self._backoff_s = min(LONGEST_BACKOFF_S, 2 * self._backoff_s)
            return False
        if now_s < self._retry_at:
            return False
        self._retry_at = 0.0
        self.restarts += 1
        self.start()
        return True


class Supervisor:
    """The children of one command, ended in reverse order of their start."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._children: list[Child] = []

    def role(self, name: str, *arguments: str, config: Path) -> Child:
        """Start a role of this program (``latencyprism ROLE ...``) as a child."""
        ready = self._folder / f"{name}.ready"
        command = [
            *(sys.executable, "-m", "latencyprism", "--config", str(config)),
            *arguments,
            *("--ready", str(ready), "--parent", str(os.getpid())),
        ]
        return self.program(name, command, ready_file=ready)

    def program(self, name: str, command: Sequence[str], ready_file: Path | None = None) -> Child:
        """Start any program as a child."""
        child = Child(name, command, self._folder / f"{name}.log", ready_file)
        child.start()
        self._children.append(child)
        return child

    @property
    def children(self) -> Sequence[Child]:
        """The children in order of their start."""
        return self._children

    def revive(self, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Start again what has ended, with backoff; names of those started now."""
        now_s = clock()
        return [child.name for child in self._children if child.revive(now_s)]

    def stop(self, timeout_s: float = 10.0) -> None:
        """End all children, the last started first."""
        for child in reversed(self._children):
            child.stop(timeout_s)
        self._children.clear()
