"""nginx: the log format that the README shows, one JSON object a line.

``$msec`` and ``$request_time`` are of the end of the request. The lists ``$upstream_*`` have an
element for each server that was tried, separated by ``,`` or, after an internal redirect, by ``:``
(https://nginx.org/en/docs/http/ngx_http_upstream_module.html#variables).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from latencyprism.collectors.gateway.access import (
    Access,
    LineError,
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

CLIENT_CLOSED: Final = 499
"""nginx's status of a request whose client went away before the answer began."""
MAX_TRIES: Final = 16

_SEPARATOR = re.compile(r" ?, ?| : ?")


def is_nginx(fields: Mapping[str, Any]) -> bool:
    """Whether fields are of the format above."""
    return "msec" in fields and "request_time" in fields


def accesses(fields: Mapping[str, Any]) -> list[Access]:
    """One of each server that was tried, in order; none when nginx answered by itself."""
    upstream = optional(fields, "upstream_addr")
    if upstream is None:
        return []
    servers = _split(upstream)
    spent = [0 if t is None else t for t in _times(fields, "upstream_response_time", len(servers))]
    headers = _times(fields, "upstream_header_time", len(servers))
    statuses = _column(fields, "upstream_status", len(servers))
    end_ns = seconds_ns(text(fields, "msec"))
    arrival_ns = end_ns - seconds_ns(text(fields, "request_time"))
    told = status(optional(fields, "status"))
    completion = fields.get("request_completion")
    cut = told == CLIENT_CLOSED or completion in ("", "-")
    target, verb = path(text(fields, "uri")), method(optional(fields, "method"))
    trace = trace_id(optional(fields, "traceparent"))
    request_bytes, request_guess = _bytes(fields, "content_length", "request_length")
    answer_bytes, answer_guess = _bytes(fields, "body_bytes_sent", "bytes_sent")
    found = []
    for index, server in enumerate(servers):
        last = index == len(servers) - 1
        header_ns = headers[index]
        estimated = ["arrival_ns"] + ["request_bytes"] * request_guess
        estimated += ["first_byte_ns"] * (header_ns is not None)
        estimated += ["response_bytes"] * answer_guess if last else ["end_ns"]
        began_ns = min(arrival_ns, end_ns)
        found.append(
            Access(
                upstream=server,
                state="aborted" if last and cut else "complete",
                arrival_ns=began_ns,
                end_ns=end_ns if last else min(began_ns + spent[index], end_ns),
                first_byte_ns=None if header_ns is None else min(began_ns + header_ns, end_ns),
                status=told if last else status(statuses[index]),
                method=verb,
                path=target,
                streaming=streaming(optional(fields, "content_type")) if last else None,
                request_bytes=request_bytes,
                response_bytes=answer_bytes if last else None,
                trace_id=trace,
                estimated=tuple(estimated),
            )
        )
        arrival_ns += spent[index]
    return found


def _split(value: str) -> list[str]:
    parts = [part for part in _SEPARATOR.split(value) if part]
    if len(parts) > MAX_TRIES:
        raise LineError("malformed", f"more than {MAX_TRIES} servers were tried")
    return parts


def _column(fields: Mapping[str, Any], name: str, length: int) -> list[str | None]:
    """A list of the log with as many elements as there were servers; of None when it is not
    logged.
    """
    value = optional(fields, name)
    parts = _split(value) if value is not None else ["-"] * length
    if len(parts) != length:
        raise LineError("malformed", f"{name} and upstream_addr differ in length")
    return [None if part == "-" else part for part in parts]


def _times(fields: Mapping[str, Any], name: str, length: int) -> list[int | None]:
    return [None if value is None else seconds_ns(value) for value in _column(fields, name, length)]


def _bytes(fields: Mapping[str, Any], body: str, whole: str) -> tuple[int | None, bool]:
    """Size of a body and False, or of a message with its headers and True."""
    told = size(optional(fields, body))
    if told is not None:
        return told, False
    message = size(optional(fields, whole))
    return message, message is not None
