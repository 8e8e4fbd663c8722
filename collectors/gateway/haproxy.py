"""HAProxy: its own ``option httplog``, and the JSON format that the README shows.

Timers are whole milliseconds: Th (handshake), Ti (idle), TR (request headers), Tw (its queues), Tc
(connect), Tr (answer headers), Ta (all but Th and Ti); -1 where the request did not get that far
(https://docs.haproxy.org/2.6/configuration.html#8.4). ``option httplog`` gives the local time.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
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
from latencyprism.schemas.records import RequestState

NO_SERVER: Final = "<NOSRV>"
MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_HTTPLOG = re.compile(
    r"\S{1,80} "
    r"\[(?P<day>\d\d)/(?P<month>[A-Z][a-z]{2})/(?P<year>\d{4})"
    r":(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<ms>\d{3})\] "
    r"\S{1,256} (?P<server>[^\s/]{1,256}/\S{1,256}) "
    r"(?P<TR>-?\d+)/(?P<Tw>-?\d+)/(?P<Tc>-?\d+)/(?P<Tr>-?\d+)/(?P<Ta>[+-]?\d+) "
    r"(?P<ST>-?\d+) (?P<B>[+-]?\d+) \S{1,256} \S{1,256} (?P<ts>\S\S)\S\S "
    r"\d+/\d+/\d+/\d+/\+?\d+ \d+/\d+ "
    r'(?:\{[^"]{0,4096}\} )?"(?:(?P<method>[A-Z]{1,16}) (?P<uri>[^\s"]{1,8192}))?',
    re.ASCII,
)


def is_haproxy(fields: Mapping[str, Any]) -> bool:
    """Whether fields are of the JSON format."""
    return "TR" in fields and "Ta" in fields


def httplog(line: str) -> list[Access] | None:
    """What a line of ``option httplog`` tells; None when it is no such line."""
    match = _HTTPLOG.match(line)
    if match is None:
        return None
    fields = {name: value for name, value in match.groupdict().items() if value is not None}
    return _accesses(fields, _local_ns(fields), fields["server"])


def accesses(fields: Mapping[str, Any]) -> list[Access]:
    """What an object of the JSON format tells; nothing when no server was reached for."""
    before = (duration_ns(optional(fields, name)) for name in ("Th", "Ti"))
    started_ns = seconds_ns(text(fields, "Ts")) + sum(spent or 0 for spent in before)
    host, port = optional(fields, "si"), optional(fields, "sp")
    if host is None or port is None:
        server = text(fields, "server")
    else:
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return _accesses(fields, started_ns, server)


def _accesses(fields: Mapping[str, Any], arrival_ns: int, server: str) -> list[Access]:
    if server.endswith(NO_SERVER):
        return []
    total = text(fields, "Ta")
    if total.startswith("+"):
        raise LineError(
            "logged early", "HAProxy logs the request before its end: remove option logasap"
        )
    total_ns = duration_ns(total)
    if total_ns is None:
        raise LineError("malformed", "Ta is missing")
    reading, queue, connect, answer = (
        duration_ns(optional(fields, name)) for name in ("TR", "Tw", "Tc", "Tr")
    )
    first_byte_ns = None
    if None not in (reading, queue, connect, answer):
        spent_ns = (reading or 0) + (queue or 0) + (connect or 0) + (answer or 0)
        first_byte_ns = arrival_ns + min(spent_ns, total_ns)
    sent, received = size(optional(fields, "U")), size(optional(fields, "B"))
    estimated = {
        "first_byte_ns": first_byte_ns,
        "request_bytes": sent,  # with headers, as is the other
        "response_bytes": received,
    }
    return [
        Access(
            upstream=server,
            state=_state(text(fields, "ts")),
            arrival_ns=arrival_ns,
            end_ns=arrival_ns + total_ns,
            first_byte_ns=first_byte_ns,
            status=status(optional(fields, "ST")),
            method=method(optional(fields, "method")),
            path=path(optional(fields, "uri") or ""),
            streaming=streaming(optional(fields, "content_type")),
            request_bytes=sent,
            response_bytes=received,
            proxy_queue_us=None if queue is None else queue // 1_000,
            trace_id=trace_id(optional(fields, "traceparent")),
            estimated=("end_ns", *(name for name, value in estimated.items() if value is not None)),
        )
    ]


def _state(termination: str) -> RequestState:
    """Aborted when the client gave up, or the answer broke off: who ended the session, then in
    which phase; ``--`` is a normal end.
    """
    cause, phase = termination[:1], termination[1:2]
    return "aborted" if cause in "Cc" or (cause != "-" and phase in "DL") else "complete"


def _local_ns(fields: Mapping[str, str]) -> int:
    """Nanoseconds of a time in this host's zone; of an hour that comes twice, the first."""
    try:
        local = datetime(  # noqa: DTZ001 - the log does not tell its zone; it is this host's
            int(fields["year"]),
            MONTHS.index(fields["month"]) + 1,
            int(fields["day"]),
            int(fields["hour"]),
            int(fields["minute"]),
            int(fields["second"]),
        )
        at_s = int(local.astimezone(UTC).timestamp())
    except (ValueError, OverflowError) as error:
        raise LineError("malformed", "its time is no time") from error
    return (at_s * 1_000 + int(fields["ms"])) * MS_NS
