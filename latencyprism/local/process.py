"""A child program that never outlives this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
STOP_TIMEOUT_S = 25.0
KILL_TIMEOUT_S = 5.0


class GuardedProcess:
    """A program under :mod:`latencyprism.local.guard`: it ends when this process does, however.

    It starts at once, in a process group of its own, so that Ctrl-C reaches only us. Its standard
    output and error go to ``output``, emptied first; the guard holds the descriptors in ``holds``
    open, and so a lock on them, until the program has ended. Raises OSError when ``output`` cannot
    be written.
    """

    def __init__(self, command: Sequence[str], output: Path, *, holds: Sequence[int] = ()) -> None:
        with output.open("wb") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=holds,
            )
        assert self._guard.stdin is not None
        self._lifeline = self._guard.stdin

    @property
    def status(self) -> int | None:
        """Exit status of the program as a shell has it, None while it runs."""
        return self._guard.poll()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ask the program to end; kill it after ``timeout_s``. True if it ended by itself."""
        self._lifeline.close()
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """End the program at once, as a crash does."""
        self._guard.send_signal(signal.SIGUSR1)
        try:
            self._guard.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        self._lifeline.close()
