"""A stream worker as a process of its own, as it runs in production."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from latencyprism.schemas.connection import KafkaConfig

PROGRAM = """
import json, logging, sys
from pathlib import Path
from latencyprism.recordings.replay import replay_config
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.worker import run_worker

logging.basicConfig(level=logging.WARNING)
task = json.loads(sys.argv[1])
config = StreamsConfig()
run_worker(
    replay_config(config) if task["event"] else config,
    KafkaConfig(**task["kafka"]),
    datadir=Path(task["datadir"]),
    ready=lambda: print("ready", flush=True),
    save_every_s=task["save_every_s"],
)
"""


class WorkerProcess:
    """Started on entry, ready when :meth:`wait` returns, killed on exit if it still runs."""

    def __init__(
        self,
        kafka: KafkaConfig,
        datadir: Path,
        *,
        event: bool = True,
        save_every_s: float = 30.0,
    ) -> None:
        self._task = {
            "kafka": asdict(kafka),
            "datadir": str(datadir),
            "event": event,
            "save_every_s": save_every_s,
        }
        self._log = datadir.with_suffix(".log")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", PROGRAM, json.dumps(self._task)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._out.close()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def _out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def log(self) -> str:
        """What it logged so far."""
        return self._log.read_text()

    def wait(self) -> Self:
        """Block until it reads its partitions; fails when it ends before."""
        assert self._out.readline() == "ready\n", self.log
        return self

    def kill(self) -> None:
        """End it without any chance to say goodbye."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
