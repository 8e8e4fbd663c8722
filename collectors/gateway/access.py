"""What a line of an access log tells, whichever gateway wrote it, and how its fields are read.

Every reader here refuses with :class:`LineError`; none keeps or repeats text of the line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from latencyprism.schemas.records import RequestState

MS_NS: Final = 1_000_000
S_NS: Final = 1_000_000_000
MAX_PATH: Final = 256
"""Longest path that is reported, in characters."""
MAX_BYTES: Final = 1 << 60
EARLIEST_NS: Final = 946_684_800 * S_NS
"""2000-01-01."""
LATEST_NS: Final = 4_102_444_800 * S_NS
"""2100-01-01."""

Refusal = Literal["malformed", "unknown format", "without times", "logged early"]

_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[^/?#]*", re.ASCII | re.IGNORECASE)
_STREAMS = ("text/event-stream", "application/x-ndjson", "application/ndjson")


class LineError(ValueError):
    """A line that cannot be used; the message says why and what to do, without the line."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind: Refusal = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One request's stay at one server, ns since the epoch on the gateway's clock.

    A request that a gateway tried at several servers is one of each.
    """

    upstream: str
    """What the log calls the server."""
    state: RequestState
    arrival_ns: int
    """When the gateway had the request for this server; of the first one, its first byte."""
    end_ns: int
    request_end_ns: int | None = None
    first_byte_ns: int | None = None
    status: int | None = None
    method: str | None = None
    path: str
    streaming: bool | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    proxy_queue_us: int | None = None
    trace_id: str | None = None
    estimated: tuple[str, ...] = ()
    """Fields that the log does not tell as such."""

    def __post_init__(self) -> None:
        times = [
            at_ns
            for at_ns in (self.arrival_ns, self.request_end_ns, self.first_byte_ns, self.end_ns)
            if at_ns is not None
        ]
        if min(times) < EARLIEST_NS or max(times) >= LATEST_NS or self.end_ns < self.arrival_ns:
            raise LineError("malformed", "its times cannot be: look at the gateway's clock")


def text(fields: Mapping[str, Any], name: str) -> str:
    """A field that may not be missing."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise LineError("malformed", f"the log's format lacks {name} or has it as no plain value")
    return value


def optional(fields: Mapping[str, Any], name: str) -> str | None:
    """A field; None when it is missing, null, empty or ``-``."""
    value = fields.get(name)
    if value is None or value in ("", "-"):
        return None
    return text(fields, name)


def seconds_ns(value: str) -> int:
    """Nanoseconds of seconds such as ``1796080269.448``, exactly."""
    match = _SECONDS.fullmatch(value)
    if match is None:
        raise LineError("malformed", "a time is not a number of seconds")
    return int(match[1]) * S_NS + int((match[2] or "").ljust(9, "0"))


def integer(value: str) -> int:
    """A whole number of at most 18 digits."""
    if _INTEGER.fullmatch(value) is None:
        raise LineError("malformed", "a count is not a whole number")
    return int(value)


def duration_ns(value: str | None) -> int | None:
    """Nanoseconds of whole milliseconds; None without any, and for the -1 of HAProxy."""
    if value is None or (ms := integer(value)) < 0:
        return None
    return ms * MS_NS


def size(value: str | None) -> int | None:
    """A number of bytes."""
    if value is None:
        return None
    count = integer(value)
    if not 0 <= count <= MAX_BYTES:
        raise LineError("malformed", "a size cannot be")
    return count


def status(value: str | None) -> int | None:
    """An HTTP status; None where there was none, which logs write as 0 or -1."""
    code = -1 if value is None else integer(value)
    return code if 100 <= code <= 999 else None


def path(value: str) -> str:
    """The path of a request target, without query and origin."""
    origin = _ORIGIN.match(value)
    target = value[origin.end() :] if origin else value
    return re.split(r"[?#]", target, maxsplit=1)[0][:MAX_PATH]


def method(value: str | None) -> str | None:
    """The request's method; None for what is none."""
    return value if value is not None and value.isalpha() and len(value) <= 16 else None


def trace_id(value: str | None) -> str | None:
    """Trace id of a ``traceparent`` header; None without a valid one."""
    match = _TRACEPARENT.fullmatch(value or "")
    return match[1] if match and match[1].strip("0") else None


def streaming(content_type: str | None) -> bool | None:
    """Whether an answer of this type is a stream of events."""
    return None if content_type is None else content_type.lower().startswith(_STREAMS)
