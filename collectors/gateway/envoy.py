"""Envoy: its default format, and the JSON format that the README shows.

Durations are whole milliseconds since the start: REQUEST_DURATION to the last byte of the request,
RESPONSE_DURATION to the first byte of the answer, DURATION to its last; BYTES_* are of bodies
(https://www.envoyproxy.io/docs/envoy/latest/configuration/observability/access_log/usage).
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from latencyprism.collectors.gateway.access import (
    MS_NS,
    Access,
    LineError,
    duration_ns,
    method,
    optional,
    path,
    seconds_ns,
    size,
    status,
    streaming,
    text,
    trace_id,
)

ABORTED: Final = frozenset({"DC", "UC", "UR", "LR", "SI", "DT", "UPE", "DPE", "UMSDR", "OM", "DI"})
"""Response flags of exchanges that ended before the answer did: either side went away or broke the
protocol, or a time limit ended it."""

_DEFAULT = re.compile(
    r"\[(?P<start>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z\] "
    r'"(?P<method>[^\s"]{1,64}) (?P<path>[^\s"]{1,8192}) [^\s"]{1,16}" '
    r"(?P<response_code>\d{1,3}) (?P<response_flags>[\w,-]{1,64}) "
    r"(?:\S{1,256} \S{1,256} \"[^\"]{0,256}\" )?"  # Istio has three more fields here
    r"(?P<bytes_received>\d+) (?P<bytes_sent>\d+) (?P<duration>\d+) (?:-|\d+) "
    r'"[^"]{0,4096}" "[^"]{0,4096}" "[^"]{0,256}" "[^"]{0,512}" "(?P<upstream_host>[^"]{1,256})"',
    re.ASCII,
)


def is_envoy(fields: Mapping[str, Any]) -> bool:
    """Whether fields are of the JSON format."""
    return "start_time" in fields and "response_flags" in fields


def default(line: str) -> list[Access] | None:
    """What a line of the default format tells; None when it is no such line."""
    match = _DEFAULT.match(line)
    if match is None:
        return None
    try:
        start = datetime.fromisoformat(match["start"] + "+00:00")
    except ValueError as error:
        raise LineError("malformed", "its time is no time") from error
    ms = int(start.replace(microsecond=0).timestamp()) * 1_000 + start.microsecond // 1_000
    return _accesses(match.groupdict(), ms * MS_NS)


def accesses(fields: Mapping[str, Any]) -> list[Access]:
    """What an object of the JSON format tells; nothing when no server was reached for."""
    return _accesses(fields, seconds_ns(text(fields, "start_time")))


def _accesses(fields: Mapping[str, Any], arrival_ns: int) -> list[Access]:
    upstream = optional(fields, "upstream_host")
    if upstream is None:
        return []
    total_ns = duration_ns(text(fields, "duration"))
    if total_ns is None:
        raise LineError("malformed", "the duration is missing")
    request_ns = duration_ns(optional(fields, "request_duration"))
    answer_ns = duration_ns(optional(fields, "response_duration"))
    flags = (optional(fields, "response_flags") or "").split(",")
    estimated = {"request_end_ns": request_ns, "first_byte_ns": answer_ns}
    return [
        Access(
            upstream=upstream,
            state="complete" if ABORTED.isdisjoint(flags) else "aborted",
            arrival_ns=arrival_ns,
            request_end_ns=None if request_ns is None else arrival_ns + min(request_ns, total_ns),
            first_byte_ns=None if answer_ns is None else arrival_ns + min(answer_ns, total_ns),
            end_ns=arrival_ns + total_ns,
            status=status(optional(fields, "response_code")),
            method=method(optional(fields, "method")),
            path=path(text(fields, "path")),
            streaming=streaming(optional(fields, "content_type")),
            request_bytes=size(optional(fields, "bytes_received")),
            response_bytes=size(optional(fields, "bytes_sent")),
            trace_id=trace_id(optional(fields, "traceparent")),
            estimated=("end_ns", *(name for name, value in estimated.items() if value is not None)),
        )
    ]
