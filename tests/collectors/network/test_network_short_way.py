"""The short way of a usual segment against the long way, which is the truth."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import (
    DONE,
    MS,
    ROLE,
    START_NS,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    chunk,
    delta,
    event,
    make_tap,
    play,
    request,
    usage,
)

from latencyprism.collectors.network import http
from latencyprism.collectors.network.framing import Messages
from latencyprism.schemas.records import RequestTiming

LINES_HEAD = STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson")


@contextmanager
def long_way_only() -> Iterator[None]:
    with patch.object(http, "USUAL_SEGMENT", 0):
        yield


def timings(segments: list[bytes], path: str, lost: frozenset[int]) -> list[RequestTiming]:
    """Parts of a stream whose segments come one a millisecond, some of them never."""
    wire, tap = Wire(), make_tap(max_gap_ms=2)
    parts = play(tap, [*wire.syn(), wire.client(request({"model": "m"}, path=path))])
    for number, segment in enumerate(segments):
        packet = wire.server(segment)
        if number not in lost:
            parts += play(tap, [packet], start_ns=START_NS + (10 + number) * MS)
    return [*parts, *tap.flush(START_NS + 1000 * MS)]


KEYS = {
    "/v1/chat/completions": b"content",
    "/v1/completions": b"text",
    "/v1/responses": b"delta",
    "/api/chat": b"content",
}
BEFORE = (
    b'data: {"choices":[{"delta":{"%b":"',
    b'event: delta\ndata: {"%b":"',
    b'data: {"cache_n":1,"%b":"',
    b'{"%b":"',
    b': {"%b":"',
    b'data: {"%b":"a"}\n\ndata: {"%b":"',
    b'data: {"x":"\n\r\n","%b":"',
    b'data: {"tool_calls":[{}]}\n\ndata: {"%b":"',
)
TEXTS = (
    *(b"a", b" token", b"tokens", b"prompt_tokens", b"_count", b"", b'"', b"a\\nb"),
    *(b"a\nb", b"\n\n", b"\n\r\n", b"\r", b"\n\ndata: [DONE]"),
)
AFTER = (
    *(b'"},"finish_reason":null}]}\n\n', b'"}\n\n', b'":5}\n\n', b'"\n :6}\n\n'),
    *(b'","prompt_tokens":5}\n\n', b'","cache_n":7}\n\n'),
    *(b'"}\r\n\r\n', b'"}\n', b'","x":"\r"}\n\n'),
)
special = st.sampled_from([ROLE, DONE, usage(3, 2, 1), b"", b": ping\n\n", delta(content="b")])


def written(body: bytes, style: int) -> bytes:
    """A chunk as servers write it."""
    size = [b"%x", b"%X", b"%04x", b"%x;a=b", b" %x"][style] % len(body)
    return size + b"\r\n" + body + b"\r\n"


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A path, and segments of its answer: mostly a chunk each, with events that mostly differ in
    their text alone.
    """
    path = draw(st.sampled_from(sorted(KEYS)))
    befores = st.sampled_from([before.replace(b"%b", KEYS[path]) for before in BEFORE])
    texts, afters = st.sampled_from(TEXTS), st.sampled_from(AFTER)
    before, after = draw(befores), draw(afters)
    usual = texts.map(lambda text: before + text + after)
    other = st.one_of(special, st.tuples(befores, texts, afters).map(b"".join))
    bodies = draw(st.lists(st.one_of(usual, usual, usual, other), min_size=2, max_size=12))
    styles = st.sampled_from([*[0] * 16, 1, 2, 3, 4])
    head = draw(st.sampled_from([STREAM_HEAD, STREAM_HEAD, STREAM_HEAD, LINES_HEAD]))
    segments = [head, *(written(body, draw(styles)) for body in bodies), STREAM_END]
    if draw(st.sampled_from([True, True, True, False])):
        return path, segments
    data = b"".join(segments)
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12))
    return path, [data[a:b] for a, b in pairwise(sorted({0, len(data), *cuts})) if b > a]


@given(streams(), st.frozensets(st.integers(1, 12), max_size=2))
def test_both_ways_tell_the_same(stream: tuple[str, list[bytes]], lost: frozenset[int]) -> None:
    path, segments = stream
    short = timings(segments, path, lost)

    with long_way_only():
        assert timings(segments, path, lost) == short


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/chat/completions", [delta(content=f" word{n}\n") for n in range(50)]),
        ("/v1/completions", [event({"choices": [{"text": f"{n}"}]}) for n in range(50)]),
        (
            "/v1/messages",
            [b"event: d\n" + event({"delta": {"text": f"x{n}", "type": "t"}}) for n in range(50)],
        ),
    ],
)
def test_a_stream_of_usual_segments_takes_the_short_way(path: str, events: list[bytes]) -> None:
    with patch.object(Messages, "feed", autospec=True, side_effect=Messages.feed) as long_way:
        parts = timings([STREAM_HEAD, *map(chunk, events), STREAM_END], path, frozenset())

    assert sum(len(p.chunk_deltas_us) + (p.chunk_base_ns is not None) for p in parts) == 50
    assert long_way.call_count == 4  # the request, the headers, the first event, the end
