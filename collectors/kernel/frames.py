"""What vLLM's API server and engine core say to each other, as far as counts and times go. Pure.

They talk over ZeroMQ (ZMTP 3, RFC 23), each message a MessagePack array of a dataclass's fields in
order. That order is vLLM's own and changes between versions, so a version that is not listed here
is not decoded. Token ids are counted and never leave this module, nor do the texts around them.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.kernel.msgpack import (
    CutError,
    ShapeError,
    array,
    is_nil,
    mapping,
    number,
    skip,
    text,
)

MAX_FRAME_BYTES: Final = 1 << 17
"""As much of one message is put together from its pieces; a longer one is passed over."""
MAX_STREAMS: Final = 64
"""Connections of one engine that are followed."""
MAX_COUNT: Final = 1 << 20
"""Larger numbers of outputs or tokens are not believed."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_ADD: Final = b"\x01\x01\x00"  # a frame of one byte, the kind of the request, and more to come
_ABORT: Final = b"\x01\x01\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Places of what is used in the arrays of one version of vLLM."""

    request_fields: int
    outputs_fields: int
    output_fields: int
    finish_reason: int
    events: int
    prefill: int
    plain: re.Pattern[bytes]
    """An output that tells of one token and nothing else: nearly all are so, and a pattern takes a
    tenth of the time. Its first two groups, one of them empty, are the length of the third, the
    request's id."""


def _plain(head: bytes, tail: bytes) -> re.Pattern[bytes]:
    text_ = rb"(?:([\xa0-\xbf])|\xd9(.))([!-~]+)"
    one_token = rb"\x91(?:[\x00-\x7f]|\xcc.|\xcd..|\xce....)"
    return re.compile(re.escape(head) + text_ + one_token + re.escape(tail), re.DOTALL)


V0_32: Final = Layout(
    request_fields=22,
    outputs_fields=9,
    output_fields=18,
    finish_reason=5,
    events=7,
    prefill=11,
    plain=_plain(b"\xdc\x00\x12", b"\xc0" * 11 + b"\x00" + b"\xc0" * 4),
)
LAYOUTS: Final = {(0, 32): V0_32}
"""vLLM's version → its layout; each was compared with the engine's own counters."""


def layout_of(version: str) -> Layout | None:
    """Layout of a version such as ``0.32.0`` or ``0.32.1+cpu``; None when it is not known."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(\.|$|\+|rc|a|b)", version)
    return LAYOUTS.get((int(found[1]), int(found[2]))) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one request got out of one step."""

    request: bytes
    tokens: int
    finished: bool
    prompt_tokens: int | None = None
    """Told with the first token, as are the next three."""
    computed_tokens: int | None = None
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    """On the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """One message of the engine core: the outcome of one step for one API server."""

    at_ns: int
    """When the step ended, by the engine's monotonic clock."""
    plain: tuple[bytes, ...]
    """Requests that got one token, and of which nothing else is told."""
    outputs: tuple[Output, ...]
    """The others."""
    active: int | None
    """Requests that run or wait after the step; told to one of the API servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A request for the engine core."""

    request: bytes
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """Requests that the API server gave up."""

    requests: tuple[bytes, ...]


def decode_outputs(body: bytes, layout: Layout) -> Outputs:
    """The message. Raises CutError when it is not whole, ShapeError when it is another."""
    fields, at = array(body, 0)
    if fields != layout.outputs_fields:
        raise ShapeError
    at = skip(body, at)  # which engine
    count, at = array(body, at)
    if count > MAX_COUNT:
        raise ShapeError
    plain: list[bytes] = []
    outputs: list[Output] = []
    for _ in range(count):
        match = layout.plain.match(body, at)
        if match is not None and _length_of(match) == len(match[3]):
            plain.append(match[3])
            at = match.end()
        else:
            output, at = _output(body, at, layout)
            outputs.append(output)
    active, at = _active(body, at)
    seconds, at = number(body, at)
    if not 0 <= seconds < 1 << 33:
        raise ShapeError
    return Outputs(
        at_ns=int(seconds * 1e9), plain=tuple(plain), outputs=tuple(outputs), active=active
    )


def _length_of(match: re.Match[bytes]) -> int:
    short, long = match[1], match[2]
    return short[0] & 0x1F if short else long[0]


def _output(body: bytes, at: int, layout: Layout) -> tuple[Output, int]:
    fields, at = array(body, at)
    if fields != layout.output_fields:
        raise ShapeError
    request, at = text(body, at)
    tokens, at = array(body, at)
    at = skip(body, at, tokens)
    at = skip(body, at, layout.finish_reason - 2)
    finished = not is_nil(body, at)
    at = skip(body, at, layout.events - layout.finish_reason)
    queued_ns, scheduled_ns, at = _events(body, at)
    at = skip(body, at, layout.prefill - layout.events - 1)
    prompt, computed, at = _prefill(body, at)
    at = skip(body, at, layout.output_fields - layout.prefill - 1)
    output = Output(
        request=request,
        tokens=tokens,
        finished=finished,
        prompt_tokens=prompt,
        computed_tokens=computed,
        queued_ns=queued_ns,
        scheduled_ns=scheduled_ns,
    )
    return output, at


_QUEUED, _SCHEDULED = 1, 2


def _events(body: bytes, at: int) -> tuple[int | None, int | None, int]:
    """First times at which the request was queued and scheduled."""
    times: dict[int, int] = {}
    if is_nil(body, at):
        return None, None, at + 1
    count, at = array(body, at)
    for _ in range(count):
        numbers, at = _numbers(body, at, (b"type", b"timestamp"))
        if len(numbers) == 2 and 0 <= numbers[b"timestamp"] < 1 << 33:
            times.setdefault(int(numbers[b"type"]), int(numbers[b"timestamp"] * 1e9))
    return times.get(_QUEUED), times.get(_SCHEDULED), at


def _prefill(body: bytes, at: int) -> tuple[int | None, int | None, int]:
    """Tokens of the prompt, and how many of them were computed rather than found in a cache."""
    if is_nil(body, at):
        return None, None, at + 1
    numbers, at = _numbers(body, at, (b"num_prompt_tokens", b"num_computed_tokens"))
    if len(numbers) < 2:
        raise ShapeError
    return int(numbers[b"num_prompt_tokens"]), int(numbers[b"num_computed_tokens"]), at


def _active(body: bytes, at: int) -> tuple[int | None, int]:
    """Requests that run or wait, from the scheduler's statistics."""
    if is_nil(body, at):
        return None, at + 1
    names = (b"num_running_reqs", b"num_waiting_reqs", b"num_skipped_waiting_reqs")
    numbers, at = _numbers(body, at, names)
    if len(numbers) < len(names):
        raise ShapeError
    return int(sum(numbers.values())), at


def _numbers(body: bytes, at: int, names: tuple[bytes, ...]) -> tuple[dict[bytes, float], int]:
    """Numbers of these names from a map, and where the next value begins."""
    pairs, at = mapping(body, at)
    found: dict[bytes, float] = {}
    while pairs and len(found) < len(names):
        pairs -= 1
        key, at = text(body, at)
        if key in names:
            found[key], at = number(body, at)
        else:
            at = skip(body, at)
    return found, skip(body, at, 2 * pairs)


def decode_inbound(data: bytes, layout: Layout) -> list[Added | Aborted]:
    """The messages to the engine core in what it received at once, as far as that was read.

    Empty when it begins with another kind of message, or in the middle of one. Raises CutError or
    ShapeError when a message begins as one of ours and goes on otherwise.
    """
    found: list[Added | Aborted] = []
    at = 0
    while data.startswith((_ADD, _ABORT), at):
        try:
            message, at = _inbound(data, at, layout)
        except CutError:
            if not found:
                raise
            break  # the rest was not read
        found.append(message)
    return found


def _inbound(data: bytes, at: int, layout: Layout) -> tuple[Added | Aborted, int]:
    """One message, and where the next begins."""
    header = _frame_header(data, at + len(_ADD))
    if header is None:
        raise CutError
    start, length = header
    add = data.startswith(_ADD, at)
    return _added(data, start, layout) if add else _aborted(data, start), start + length


def _added(data: bytes, at: int, layout: Layout) -> Added:
    fields, at = array(data, at)
    if fields != layout.request_fields:
        raise ShapeError
    request, at = text(data, at)
    if is_nil(data, at):  # embeddings in place of tokens
        return Added(request=request, prompt_tokens=0)
    tokens, _ = array(data, at)
    return Added(request=request, prompt_tokens=tokens)


def _aborted(data: bytes, at: int) -> Aborted:
    count, at = array(data, at)
    requests: list[bytes] = []
    for _ in range(min(count, MAX_COUNT)):
        try:
            request, at = text(data, at)
        except CutError:
            if not requests:
                raise
            break  # the rest was not read
        requests.append(request)
    return Aborted(requests=tuple(requests))


class Messages:
    """Cuts what one connection sends into ZeroMQ frames, though only a part of it was read.

    A piece is what one system call sent: its first bytes, and how many there were. Frames go over
    several pieces; where they begin is known from their lengths. After something was lost, or
    where lengths make no sense, the next piece is taken for the beginning of a frame.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._held = bytearray()
        self._cut = False
        """Whether bytes of the frame that is being put together were not read."""
        self._missing = 0
        """Bytes that the frame still lacks."""

    def lose(self) -> None:
        """Pieces were lost: begin anew."""
        self._held.clear()
        self._missing, self._cut = 0, False

    def add(self, piece: bytes, length: int) -> list[bytes]:
        """Whole frames that end in the piece; ``length`` is how much it was a part of."""
        frames: list[bytes] = []
        at = 0
        while at < length:
            if not self._missing:
                header = _frame_header(piece, at)
                if header is None:
                    self._counts["frames out of step" if at < len(piece) else "frames cut"] += 1
                    return frames
                start, self._missing = header
                self._held.clear()
                self._cut = False
                at = start
            taken = min(self._missing, length - at)
            self._take(piece[at : at + taken], taken)
            at += taken
            self._missing -= taken
            if not self._missing:
                if self._cut:
                    self._counts["frames cut"] += 1
                else:
                    frames.append(bytes(self._held))
        return frames

    def _take(self, data: bytes, length: int) -> None:
        if len(data) < length or len(self._held) + length > MAX_FRAME_BYTES:
            self._cut = True
            self._held.clear()
        if not self._cut:
            self._held += data


def _frame_header(piece: bytes, at: int) -> tuple[int, int] | None:
    """Where a frame's body begins, and its length; None when no frame begins there."""
    if at >= len(piece) or piece[at] & ~(_MORE | _LONG | _COMMAND):
        return None
    start = at + (9 if piece[at] & _LONG else 2)
    if start > len(piece):
        return None
    length = int.from_bytes(piece[at + 1 : start], "big")
    return (start, length) if length < 1 << 40 else None
