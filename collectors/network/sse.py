"""Server-sent events: where one ends, and whether it brought anything that a user waits for.

Bytes are looked for with ``find``: ``in`` first tries to take its left side for a number, and the
exception that this costs takes longer than the search.
"""

import re
from collections.abc import Sequence
from typing import Final

_END = re.compile(rb"\n\r?\n")
_LONGEST_END: Final = 3

_CONTENT = re.compile(
    rb'"(?:(?:reasoning_)?content|text|reasoning|arguments)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*\{'
    rb'|"(?:output|token)_ids"\s*:\s*\[\s*\d'
)
_COMMON: Final = (b'"content":"', b'"text":"')
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]")


class EventSplitter:
    """Cuts the body of an event stream into events, the same ones for any pieces it comes in.

    An event is given out, its blank line included, with the piece that completes it. Of an event
    larger than ``max_bytes`` only the head is kept and given out, and ``oversized`` counts it.
    Lines end with LF or CR LF; CR alone, which no engine writes, is not taken for an end.
    """

    __slots__ = ("_carry", "_large", "_max_bytes", "oversized")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._carry = b""
        self._large = False
        self.oversized = 0

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Events that this piece completes, oldest first."""
        one = not self._carry and data.find(b"\n\n") == len(data) - 2 >= 0 and data.find(b"\r") < 0
        if one and len(data) <= self._max_bytes:  # what an engine sends most often
            return (data,)
        text = self._carry + data
        events = []
        start, search = 0, max(0, len(self._carry) - _LONGEST_END + 1)
        while found := _END.search(text, search):
            events.append(self._complete(text[start : found.end()]))
            start = search = found.end()
        self._carry = self._keep(text[start:])
        return events

    def _complete(self, event: bytes) -> bytes:
        if not self._large and len(event) <= self._max_bytes:
            return event
        self._large = False
        self.oversized += 1
        return event[: self._max_bytes - _LONGEST_END]

    def _keep(self, rest: bytes) -> bytes:
        """The head, and as much of the tail as may belong to an end that is still to come."""
        if len(rest) <= self._max_bytes:
            return rest
        self._large = True
        return rest[: self._max_bytes - _LONGEST_END] + rest[-_LONGEST_END:]


def has_content(event: bytes) -> bool:
    """Whether the event carries generated output: text, reasoning, tool calls or token ids.

    Not content: the chunk that only names the role, an empty delta, usage, ``[DONE]``, comments and
    errors. Keys are looked for as they stand in JSON; inside a string their quotes are escaped.
    """
    for key in _COMMON:
        at = event.find(key)
        if at >= 0 and event[at + len(key) : at + len(key) + 1] != b'"':
            return event.find(b"data:") >= 0
    return _CONTENT.search(event) is not None and event.find(b"data:") >= 0


def is_done(event: bytes) -> bool:
    """Whether it is the ``[DONE]`` that OpenAI-compatible streams end with."""
    return _DONE.search(event) is not None
