"""One process a folder, and where that process can be reached."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK = "store.lock"
ENDPOINT = "store.json"


class DirectoryTakenError(OSError):
    """Another process owns the folder; the text says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of the store process of a folder."""

    url: str
    pid: int


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Own the folder while the block runs; made if it is missing.

    The kernel frees it when the process ends, however it ends. Raises
    :class:`DirectoryTakenError`, and OSError when the folder cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            where = find_endpoint(directory)
            reach = f"use it at {where.url}" if where else "wait until it has started"
            raise DirectoryTakenError(
                f"{directory} belongs to the store process {owner}: {reach}, or stop it first"
            ) from e
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            (directory / ENDPOINT).unlink(missing_ok=True)


def announce(directory: Path, endpoint: Endpoint) -> None:
    """Write where the store can be reached, in one step."""
    draft = directory / (ENDPOINT + ".draft")
    draft.write_text(json.dumps({"url": endpoint.url, "pid": endpoint.pid}))
    draft.replace(directory / ENDPOINT)


def find_endpoint(directory: Path) -> Endpoint | None:
    """Where the folder's store said it can be reached; it may have been killed since."""
    try:
        found = json.loads((directory / ENDPOINT).read_text())
        return Endpoint(url=str(found["url"]), pid=int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
