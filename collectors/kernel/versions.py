"""Which version each engine is."""

import http.client
import json
import queue
import threading
from collections.abc import Sequence
from typing import Final
from urllib.parse import SplitResult

from latencyprism.collectors.address import endpoint, instance_of

TIMEOUT_S: Final = 2.0
RETRY_S: Final = 5.0
AGAIN_S: Final = 60.0
"""An engine that is started again may be another version."""
MAX_BYTES: Final = 4096


class Versions:
    """Asks each engine, in a thread of its own because an engine may hang, until ``stop`` is set.

    ``known`` is the version of all of them where that is set; then nobody is asked.
    """

    def __init__(self, engines: Sequence[str], known: str, stop: threading.Event) -> None:
        self._answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._engines = tuple(engines)
        self._stop = stop
        if known:
            for url in engines:
                self._answers.put((instance_of(url), known))
        else:
            threading.Thread(target=self._ask, name="kernel versions", daemon=True).start()

    def answers(self) -> list[tuple[str, str]]:
        """Instances and versions that became known, or others, since the last call."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get_nowait())
        return found

    def _ask(self) -> None:
        known: dict[str, str] = {}
        while not self._stop.is_set():
            for url in self._engines:
                version, instance = ask_version(endpoint(url)), instance_of(url)
                if version is not None and known.get(instance) != version:
                    known[instance] = version
                    self._answers.put((instance, version))
            self._stop.wait(RETRY_S if len(known) < len(self._engines) else AGAIN_S)


def ask_version(url: SplitResult) -> str | None:
    """What vLLM answers to ``/version``; None when it does not. Blocks for some seconds at most."""
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(str(url.hostname), url.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/version", headers={"User-Agent": "latencyprism"})
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
        answer = json.loads(body) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        connection.close()
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and version else None
