"""A store or a sink as a child process that may be killed: for tests, benchmarks and demos."""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.store.lock import find_endpoint

START_S = 60.0
STOP_S = 30.0

P = TypeVar("P", bound="_Child")


class _Child(ABC):
    """A process with a log, started and ended any number of times."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @abstractmethod
    def start(self: P) -> P:
        """Start it and wait until it is ready. Raises RuntimeError with the end of its log."""

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

    def __enter__(self: P) -> P:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running:
            self.stop()

    def _launch(
        self, command: Sequence[str], *, environment: Mapping[str, str], given: str = ""
    ) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment),
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(given.encode())
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{command[0]} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it can do its work."""


class StoreProcess(_Child):
    """A store process of a folder."""

    def __init__(self, directory: Path, *, port: int = 0, password: str = "") -> None:
        super().__init__(directory / "store.log")
        self.directory = directory
        self._port = port
        self._password = password

    @property
    def url(self) -> str:
        """Where it answers; changes with every start unless a port was given."""
        endpoint = find_endpoint(self.directory)
        if endpoint is None:
            raise RuntimeError(f"no store process serves {self.directory}")
        return endpoint.url

    def start(self) -> "StoreProcess":
        """Start it and wait until it answers. Raises RuntimeError with the end of its log."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._launch(
            [
                *("latencyprism.sinks.store", "--directory", str(self.directory)),
                *("--port", str(self._port)),
            ],
            environment={"LATENCYPRISM_STORE_PASSWORD": self._password},
        )
        return self

    def _is_ready(self) -> bool:
        endpoint = find_endpoint(self.directory)
        process = self._process
        return endpoint is not None and process is not None and endpoint.pid == process.pid


class SinkProcess(_Child):
    """A sink process; its log and ready file are in ``folder``."""

    def __init__(self, store: StoreConfig, kafka: KafkaConfig, folder: Path) -> None:
        super().__init__(folder / "sink.log")
        self._settings = json.dumps({"store": asdict(store), "kafka": asdict(kafka)})
        self._ready = folder / "sink.ready"

    def start(self) -> "SinkProcess":
        """Start it and wait until it has partitions. Raises RuntimeError with its log's end."""
        self._ready.unlink(missing_ok=True)
        self._launch(
            ["latencyprism.sinks", "--ready", str(self._ready)],
            environment={},
            given=self._settings,
        )
        return self

    def _is_ready(self) -> bool:
        return self._ready.exists()
