"""What the brokers that this machine can run for itself have in common."""

import contextlib
import fcntl
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from latencyprism.local.process import GuardedProcess

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
PORT_ATTEMPTS = 3
TAIL_LINES = 15


class BrokerError(OSError):
    """A local broker that cannot run; the text says what happened and what to do."""


class UnavailableError(BrokerError):
    """What the broker needs is not on this machine, so another kind may serve."""


class LocalBroker(ABC):
    """A broker on the loopback address, run as a child that never outlives this process.

    With a ``directory`` the data is kept there, for one broker at a time. Without one a temporary
    directory serves from the first :meth:`start` to :meth:`close`. ``port`` None takes a free one
    and keeps it. As a context manager it starts on entry and closes on exit. Not thread-safe.
    """

    product: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ()
    """What it does otherwise than Apache Kafka, a sentence each."""

    def __init__(self, *, directory: Path | None = None, port: int | None = None) -> None:
        self._directory = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._port = port
        self._process: GuardedProcess | None = None

    @property
    def bootstrap(self) -> str:
        """Its address as host:port; to be read once it was started."""
        assert self._port is not None, "the broker was never started"
        return f"{HOST}:{self._port}"

    @property
    def name(self) -> str:
        """What it is and where, in words."""
        return f"{self.product} at {self.bootstrap}"

    @property
    def running(self) -> bool:
        """Whether its program runs."""
        return self._process is not None and self._process.status is None

    def start(self) -> Self:
        """Start it and block until it answers; does nothing when it runs.

        Raises :class:`UnavailableError` when something is to be installed first, and
        :class:`BrokerError` with the end of its log when it does not come up.
        """
        if self.running:
            return self
        try:
            directory = self._open_directory()
            with (directory / "lock").open("w") as lock:
                self._start(directory, _hold(lock.fileno(), directory))
        except BaseException:
            self._clean_up()
            raise
        return self

    def stop(self) -> None:
        """End it in good order, which takes up to 25 s; the data stays for the next start."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End it at once, as a crash does; the data stays for the next start."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        """Stop it and remove the temporary directory, if it had one."""
        self.stop()
        self._clean_up()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def _command(self, port: int, directory: Path) -> list[str]:
        """The program that serves ``port`` and keeps its data in ``directory``, made ready to run.

        May block. Raises :class:`BrokerError`.
        """

    def _start(self, directory: Path, lock: int) -> None:
        output = directory / "output.log"
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = self._port or free_port()
            if port_taken(port):
                raise BrokerError(
                    f"{self.product} cannot listen on {HOST}:{port}: another program does. End "
                    "it or choose another port"
                )
            process = GuardedProcess(self._command(port, directory), output, holds=[lock])
            try:
                _await_answer(port, process)
            except BrokerError as e:
                process.stop()
                told = tail(output, directory / "kafka.log")
                lost_race = "in use" in told and self._port is None
                if lost_race and attempt < PORT_ATTEMPTS:
                    continue
                raise BrokerError(
                    f"{self.product} did not start: {e}. The end of its log:\n{told}"
                ) from e
            except BaseException:
                process.stop()
                raise
            self._port, self._process = port, process
            return

    def _open_directory(self) -> Path:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            return self._directory
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="latencyprism-broker-")
        return Path(self._temporary.name)

    def _clean_up(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def free_port() -> int:
    """A loopback TCP port that is free now; another program may take it later."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def port_taken(port: int) -> bool:
    """Whether a program listens on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def tail(*logs: Path) -> str:
    """Last lines of the logs in their order, without Java's stack frames; absent logs are none."""
    lines: list[str] = []
    for log in logs:
        if log.is_file():
            text = log.read_text(errors="replace")
            told = [line for line in text.splitlines() if not line.startswith("\tat ")]
            lines += told[-TAIL_LINES:]
    return "\n".join(lines) or "(nothing was logged)"


def _hold(lock: int, directory: Path) -> int:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise BrokerError(f"another broker runs on {directory}: end it or choose another") from e
    return lock


def _await_answer(port: int, process: GuardedProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not port_taken(port):
        _check(process, deadline)
        time.sleep(0.05)
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})
    while True:
        with contextlib.suppress(KafkaException):
            if admin.list_topics(timeout=0.5).brokers:
                return
        _check(process, deadline)


def _check(process: GuardedProcess, deadline: float) -> None:
    if process.status is not None:
        raise BrokerError(f"its program ended with status {process.status}")
    if time.monotonic() > deadline:
        raise BrokerError(f"it did not answer within {START_TIMEOUT_S:.0f} s")
