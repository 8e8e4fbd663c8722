"""Which gateway wrote a line, and what it tells."""

import json
import re
from typing import Any, Final

from latencyprism.collectors.gateway import envoy, haproxy, nginx
from latencyprism.collectors.gateway.access import Access, LineError

_PRIORITY = re.compile(r"<\d{1,3}>")
_RFC5424 = re.compile(
    r"1 (?:-|\d{4}-\S{1,60}) \S{1,255} \S{1,48} \S{1,128} \S{1,32} (?:-|\[[^\]]{0,1024}\]) ?"
)
_RFC3164 = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S{1,40}) "
    r"(?:[^\s:\[{]{1,255} )?[\w./-]{1,64}(?:\[\d{1,10}\])?: ",
    re.ASCII,
)
_COMBINED = re.compile(r'\S{1,64} \S{1,64} \S{1,256} \[\d\d/[A-Z][a-z]{2}/\d{4}:[^\]]{1,32}\] "')

TEXT_FORMATS: Final = (haproxy.httplog, envoy.default)
JSON_FORMATS: Final = (
    (nginx.is_nginx, nginx.accesses),
    (haproxy.is_haproxy, haproxy.accesses),
    (envoy.is_envoy, envoy.accesses),
)


def read(told: str) -> list[Access]:
    """What a line without its syslog header tells, of each server that was tried; nothing when
    none was. Raises :class:`LineError`.
    """
    if told.startswith("{"):
        return _json(told)
    for accesses in TEXT_FORMATS:
        found = accesses(told)
        if found is not None:
            return found
    if _COMBINED.match(told):
        raise LineError(
            "without times",
            "the common and combined formats tell neither times nor servers: log in the format "
            "that the README of the gateway source shows",
        )
    raise LineError("unknown format", "use a format that the README of the gateway source shows")


def message(raw: bytes) -> str:
    """A line without its syslog header (RFC 3164 or RFC 5424), if it has one."""
    line = raw.decode("utf-8", "replace").strip("\0\r\n ")
    priority = _PRIORITY.match(line)
    if priority is not None:
        line = line[priority.end() :]
        header = _RFC5424.match(line) or _RFC3164.match(line)
    else:
        header = _RFC3164.match(line)
    return line[header.end() :] if header is not None else line


def _json(told: str) -> list[Access]:
    try:
        fields: Any = json.loads(told, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise LineError(
            "malformed", "it is no whole JSON object; HAProxy cuts lines unless its log has len"
        ) from error
    for is_of, accesses in JSON_FORMATS:
        if is_of(fields):
            return accesses(fields)
    raise LineError(
        "unknown format", "its JSON has none of the fields that tell gateways apart; see the README"
    )
