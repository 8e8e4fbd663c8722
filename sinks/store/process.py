"""The store as a child process: for tests, benchmarks and whoever needs one for a while."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from latencyprism.sinks.store.lock import find_endpoint

START_S = 30.0
STOP_S = 30.0


class StoreProcess:
    """A store process of a folder; may be killed and started again on the same folder."""

    def __init__(self, directory: Path, *, port: int = 0, password: str = "") -> None:
        self.directory = directory
        self._port = port
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What the process wrote."""
        return self.directory / "store.log"

    @property
    def url(self) -> str:
        """Where it answers; changes with every start unless a port was given."""
        endpoint = find_endpoint(self.directory)
        if endpoint is None:
            raise RuntimeError(f"no store process serves {self.directory}")
        return endpoint.url

    def start(self) -> "StoreProcess":
        """Start it and wait until it answers. Raises RuntimeError with its log when it does not."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "latencyprism.sinks.store"),
                    *("--directory", str(self.directory), "--port", str(self._port)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"LATENCYPRISM_STORE_PASSWORD": self._password},
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the store did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def stop(self) -> int:
        """Ask it to end and wait; its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "StoreProcess":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()

    def _answers(self) -> bool:
        endpoint = find_endpoint(self.directory)
        return (
            endpoint is not None and self._process is not None and endpoint.pid == self._process.pid
        )
