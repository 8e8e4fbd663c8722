"""A recording on disk: a folder with one Avro container file a telemetry topic.

========================  =====================================================================
``meta.json``             :class:`Meta`
``<topic>.avro``          plain records of the topic, deflated, mostly in time order
``faults.jsonl``          injected faults, one a line; what they mean stands in ``labels.json``
``labels.json``           what is expected of each fault window
``foreign.jsonl.gz``      CPU that other programs took, one line a second
``truth/``                what the engine itself logged; to compare with, never an input
========================  =====================================================================
"""

import hashlib
import heapq
import io
import json
import logging
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import fastavro
from fastavro.write import Writer

from latencyprism.schemas import avro
from latencyprism.schemas.topics import BY_NAME, TELEMETRY, Topic

log = logging.getLogger(__name__)

FORMAT = 1
META = "meta.json"
FAULTS = "faults.jsonl"
LABELS = "labels.json"
FOREIGN = "foreign.jsonl.gz"
TRUTH = "truth"
MARKER_BYTES = 16
BLOCK_BYTES = 64 << 10
"""Plain bytes of a block: what one damaged byte, or a recorder that is killed, can cost."""


class RecordingError(ValueError):
    """A folder that is no recording, or one that can't be written; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A part of a recording that could not be read and was left out."""

    file: str
    record: int
    """Records of the file that had been read before it, so the number of the first one lost."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, record {self.record}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a recording is of."""

    engine: str | None
    """Engine's name as in EngineSample; None when nobody told."""
    source: str
    """How it came to be, in words."""
    start_ns: int
    """No record was observed before, ns since the epoch."""
    end_ns: int
    """No record was observed after."""
    streams: Mapping[str, tuple[str, ...]]
    """Instances by topic name: who reported what."""
    truth: tuple[str, ...] = ()
    """Files under ``truth/``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the recorder told, such as versions; for people."""


class RecordingWriter:
    """Writes the telemetry files and ``meta.json`` of a new recording.

    After each :meth:`flush` the folder is a whole recording of what came before, so that one whose
    recorder is killed can be used. Not thread-safe.
    """

    def __init__(self, folder: Path, *, engine: str | None, source: str) -> None:
        """Make the folder. Raises RecordingError when it holds something already."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RecordingError(f"{folder} is not an empty folder: choose another to record into")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.truth: tuple[str, ...] = ()
        self.details: Mapping[str, Any] = {}
        self.engine = engine
        self._source = source
        self._files: dict[str, _File] = {}
        self._start_ns: int | None = None
        self._end_ns: int | None = None

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def span(self, start_ns: int, end_ns: int) -> None:
        """Widen the time recorded to at least this, records or not."""
        self._start_ns = start_ns if self._start_ns is None else min(self._start_ns, start_ns)
        self._end_ns = end_ns if self._end_ns is None else max(self._end_ns, end_ns)

    def write(self, topic: Topic, record: Any) -> None:
        """Append a record to its topic's file. Raises ValueError when it does not fit."""
        if topic.name not in self._files:
            self._files[topic.name] = _File(self.folder, topic)
        self._files[topic.name].write(record)
        self.span(record.observed_at_ns, record.observed_at_ns)

    def flush(self) -> None:
        """Bring all that was written to the files, and ``meta.json`` up to date."""
        for file in self._files.values():
            file.flush()
        if self._start_ns is None or self._end_ns is None:
            return
        meta = {
            "format": FORMAT,
            "engine": self.engine,
            "source": self._source,
            "start_ns": self._start_ns,
            "end_ns": self._end_ns,
            "streams": {name: sorted(file.instances) for name, file in sorted(self._files.items())},
            "truth": list(self.truth),
            "details": dict(self.details),
        }
        replace_text(self.folder / META, json.dumps(meta, indent=1) + "\n")

    def close(self) -> None:
        """Flush and close the files; a second call does nothing."""
        self.flush()
        for file in self._files.values():
            file.close()
        self._files.clear()


class _File:
    """One topic's container file while it is written."""

    def __init__(self, folder: Path, topic: Topic) -> None:
        self.instances: set[str] = set()
        self._file = (folder / f"{topic.name}.avro").open("wb")
        self._to_dict = avro.to_dict(topic.record)
        # A marker of the topic's own instead of a random one: the same records, the same bytes.
        marker = hashlib.blake2b(topic.name.encode(), digest_size=MARKER_BYTES).digest()
        self._writer = Writer(
            self._file,
            avro.record_schema(topic.record),
            codec="deflate",
            sync_interval=BLOCK_BYTES,
            sync_marker=marker,
        )

    def write(self, record: Any) -> None:
        self._writer.write(self._to_dict(record))
        self.instances.add(record.instance)

    def flush(self) -> None:
        self._writer.flush()
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recording:
    """A recording that is read; files are streamed, a block at a time."""

    def __init__(self, folder: Path) -> None:
        """Read ``meta.json``. Raises RecordingError when it is missing or not understood."""
        self.folder = folder
        self.meta = _read_meta(folder / META)
        self.damage: list[Damage] = []
        """What the reading so far had to leave out; at most one entry a block."""

    def records(self, topic: Topic) -> Iterator[Any]:
        """The topic's records in the order of its file, none when there is no file.

        What is broken is logged, noted in :attr:`damage` and left out.
        """
        path = self.folder / f"{topic.name}.avro"
        if not path.exists():
            if topic.name in self.meta.streams:
                self._damaged(path, 0, "the file is missing")
            return
        from_dict = avro.from_dict(topic.record)
        schema = avro.parse(avro.record_schema(topic.record))
        read = 0
        for at, container in _containers(path):
            try:
                values = cast(
                    "Iterator[dict[str, Any]]", fastavro.reader(io.BytesIO(container), schema)
                )
                records = [from_dict(value) for value in values]
            except Exception as e:  # noqa: BLE001 # fastavro and zlib raise what their C code meets
                self._damaged(path, read, f"block at byte {at}: {type(e).__name__} {e}")
                continue
            plausible = [record for record in records if self._is_of(topic, record)]
            if len(plausible) < len(records):
                strays = len(records) - len(plausible)
                reason = (
                    f"block at byte {at}: {strays} records of an instance or time not in {META}"
                )
                self._damaged(path, read, reason)
            read += len(records)
            yield from plausible

    def _is_of(self, topic: Topic, record: Any) -> bool:
        """Whether meta tells of the record; bytes that were damaged may decode all the same."""
        in_time = self.meta.start_ns <= record.observed_at_ns <= self.meta.end_ns
        return in_time and record.instance in self.meta.streams.get(topic.name, ())

    def merged(self) -> Iterator[tuple[Topic, Any]]:
        """Records of all topics by ``observed_at_ns``; equal times in the order of TELEMETRY."""
        streams = [self._keyed(order, topic) for order, topic in enumerate(TELEMETRY)]
        for _, topic, record in heapq.merge(*streams, key=lambda item: item[0]):
            yield topic, record

    def _keyed(self, order: int, topic: Topic) -> Iterator[tuple[tuple[int, int], Topic, Any]]:
        for record in self.records(topic):
            yield (record.observed_at_ns, order), topic, record

    def _damaged(self, path: Path, record: int, reason: str) -> None:
        damage = Damage(file=path.name, record=record, reason=reason)
        self.damage.append(damage)
        log.warning("%s: %s; left out", self.folder, damage)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader finds the old text or the new one, never a part."""
    fresh = path.with_name(path.name + ".part")
    fresh.write_text(text)
    fresh.replace(path)


def _containers(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte position, container that holds it alone) of each block of a container file.

    The blocks end with a marker that the header tells, so a broken one does not hide the next. The
    last may be cut off; where even the header is broken, one piece of the file is all there is.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield 0, b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                fastavro.reader(cast("BinaryIO", data))
            except Exception:  # noqa: BLE001 # told by whoever decodes the piece
                yield 0, data[:BLOCK_BYTES]
                return
            at = data.tell()
            header, marker = data[:at], data[at - MARKER_BYTES : at]
            while at < len(data):
                found = data.find(marker, at)
                end = found + MARKER_BYTES if found >= 0 else len(data)
                yield at, header + data[at:end]
                at = end


def _read_meta(path: Path) -> Meta:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordingError(f"{path.parent} is no recording: it has no {path.name}") from None
    except (OSError, ValueError) as e:
        raise RecordingError(f"{path} can't be read: {e}") from e
    if not isinstance(found, dict) or "format" not in found:
        raise RecordingError(
            f"{path} is of no recording; a trace of the lab is converted by `latencyprism import`"
        )
    if found["format"] != FORMAT:
        raise RecordingError(f"{path} has format {found['format']}, this release reads {FORMAT}")
    try:
        meta = Meta(
            engine=found["engine"],
            source=found["source"],
            start_ns=int(found["start_ns"]),
            end_ns=int(found["end_ns"]),
            streams={topic: tuple(who) for topic, who in found["streams"].items()},
            truth=tuple(found["truth"]),
            details=found["details"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise RecordingError(f"{path} is damaged: {type(e).__name__} {e}") from e
    unknown = set(meta.streams) - set(BY_NAME)
    if unknown:
        raise RecordingError(f"{path} tells of topics unknown to this release: {sorted(unknown)}")
    return meta
