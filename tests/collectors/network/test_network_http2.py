import json
import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_http2 import Talk
from network_wire import (
    DONE,
    INSTANCE,
    MS,
    ROLE,
    START_NS,
    Wire,
    answer,
    delta,
    make_tap,
    play,
    request,
    usage,
)

from latencyprism.collectors.network import http2_frames as h2
from latencyprism.collectors.network.http2 import UNKNOWN_ENDPOINT
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "PROMPT text"}]}
EVENTS = [ROLE, delta(content="ANSWER"), delta(content=" text"), usage(11, 2, 4), DONE]


def stream(talk: Talk, number: int, *, padding: int | None = None) -> None:
    """The whole answer, an event a segment."""
    talk.head(number)
    for event in EVENTS:
        talk.data(number, event, pad_length=padding)
    talk.data(number, b"", end_stream=True)


def one_stream(**how: Any) -> Talk:
    talk = Talk()
    talk.open()
    stream(talk, talk.ask(BODY), **how)
    return talk


def times(part: RequestTiming) -> list[int]:
    if part.chunk_base_ns is None:
        return []
    return [
        part.chunk_base_ns + delta_us * 1000
        for delta_us in accumulate(part.chunk_deltas_us, initial=0)
    ]


def facts(part: RequestTiming) -> tuple[Any, ...]:
    return (
        part.state,
        part.endpoint,
        part.status,
        part.streaming,
        part.model,
        part.request_bytes,
        part.response_bytes,
        part.prompt_tokens,
        part.cached_tokens,
        part.completion_tokens,
        len(times(part)),
        part.estimated,
    )


def mid_connection(talk: Talk, skipped: int) -> list[bytes]:
    """Packets of the connection without its handshake and its first pieces."""
    return talk.packets()[2 + skipped :]


def test_a_stream_tells_what_the_same_stream_tells_over_http1() -> None:
    talk = one_stream()
    sent = [side for side, _ in talk.pieces]
    first = 2 + len(sent) - 1 - sent[::-1].index("client")  # the request's body

    (part,) = play(make_tap(), talk.packets())

    assert facts(part) == (
        "complete",
        "/v1/chat/completions",
        200,
        True,
        "m",
        len(json.dumps(BODY)),
        len(b"".join(EVENTS)),
        11,
        4,
        2,
        2,
        (),
    )
    at = [START_NS + (first + n) * MS for n in range(9)]
    assert (part.arrival_ns, part.request_end_ns) == (at[0] - MS, at[0])
    assert (part.first_byte_ns, part.first_token_ns) == (at[1], at[3])
    assert times(part) == at[3:5]
    assert part.end_ns == at[7]
    assert part.instance == INSTANCE


def test_streams_of_one_connection_are_told_apart() -> None:
    talk = Talk()
    talk.open()
    bodies = [{**BODY, "model": f"m{n}"} for n in range(5)]
    numbers = [talk.ask(body) for body in bodies]
    for number in reversed(numbers):
        talk.head(number)
    for turn, event in enumerate(EVENTS):
        for place, number in enumerate(numbers):
            if turn == 1:
                for _ in range(place):
                    talk.data(number, delta(content="more"))
            talk.data(number, event)
    for number in numbers:
        talk.data(number, b"", end_stream=True)
    tap = make_tap()

    parts = play(tap, talk.packets())

    assert sorted((part.model, len(times(part))) for part in parts) == [
        (f"m{n}", 2 + n) for n in range(5)
    ]
    assert {part.state for part in parts} == {"complete"}
    assert len({part.request_id for part in parts}) == 5
    assert tap.counts == {"exchanges": 5}


def test_requests_in_one_segment_have_ids_of_their_own() -> None:
    talk = Talk()
    talk.open()
    mark = len(talk.pieces)
    for _ in range(3):
        talk.ask(BODY)
    talk.pieces[mark:] = [("client", b"".join(data for _, data in talk.pieces[mark:]))]

    parts = play(make_tap(), talk.packets())

    assert len({part.request_id for part in parts}) == 3
    assert len({part.arrival_ns for part in parts}) == 1


def test_padding_is_no_content() -> None:
    plain, padded = one_stream(), one_stream(padding=200)

    assert facts(play(make_tap(), padded.packets())[0]) == facts(
        play(make_tap(), plain.packets())[0]
    )


def test_an_answer_that_is_no_stream() -> None:
    talk = Talk()
    talk.open()
    number = talk.ask(BODY)
    talk.head(number, "application/json")
    body = b'{"model":"real","usage":{"prompt_tokens":3,"completion_tokens":4}}'
    talk.data(number, body, end_stream=True)

    (part,) = play(make_tap(), talk.packets())

    assert (part.state, part.streaming, part.first_token_ns) == ("complete", False, None)
    assert (part.prompt_tokens, part.completion_tokens, part.model) == (3, 4, "m")


def test_an_answer_of_headers_alone() -> None:
    talk = Talk()
    talk.open()
    number = talk.ask(BODY)
    talk.server.send_headers(number, [(":status", "503")], end_stream=True)
    talk.flush()

    (part,) = play(make_tap(), talk.packets())

    assert (part.state, part.status, part.response_bytes) == ("complete", 503, 0)


def test_other_paths_are_counted() -> None:
    talk = Talk()
    talk.open()
    number = talk.ask(path="/metrics", method="GET")
    talk.head(number, "text/plain")
    talk.data(number, b"data: x\n\n", end_stream=True)
    tap = make_tap()

    assert play(tap, talk.packets()) == []
    assert tap.counts == {"other requests": 1}


def test_informational_answers_and_trailers_change_nothing() -> None:
    talk = Talk()
    talk.open()
    number = talk.ask(BODY)
    talk.server.send_headers(number, [(":status", "103"), ("link", "</a>")])
    talk.flush()
    talk.head(number)
    talk.data(number, delta(content="x"))
    talk.server.send_headers(number, [("x-checksum", "1")], end_stream=True)
    talk.flush()

    (part,) = play(make_tap(), talk.packets())

    assert (part.status, part.state, len(times(part))) == (200, "complete", 1)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_reset_ends_one_stream_alone(side: str) -> None:
    talk = Talk()
    talk.open()
    first, second = talk.ask(BODY), talk.ask(BODY)
    talk.head(first)
    talk.data(first, delta(content="x"))
    getattr(talk, side).reset_stream(first, 8)
    talk.flush()
    stream(talk, second)

    parts = play(make_tap(), talk.packets())

    assert [(p.state, len(times(p)), p.estimated) for p in parts] == [
        ("aborted", 1, ()),
        ("complete", 2, ()),
    ]


def test_a_reset_after_the_stream_said_done_is_no_abort() -> None:
    talk = Talk()
    talk.open()
    number = talk.ask(BODY)
    talk.head(number)
    talk.data(number, DONE)
    talk.client.reset_stream(number)
    talk.flush()

    (part,) = play(make_tap(), talk.packets())

    assert part.state == "complete"


def test_streams_that_a_leaving_server_does_not_take_up_are_aborted() -> None:
    talk = Talk()
    talk.open()
    first, _second = talk.ask(BODY), talk.ask(BODY)
    talk.server.close_connection(last_stream_id=first)
    talk.flush()

    parts = play(make_tap(), talk.packets())

    assert sorted(part.state for part in parts) == ["aborted", "open"]


@pytest.mark.parametrize(
    ("how", "state", "estimated"),
    [("fin", "aborted", ()), ("reset", "aborted", ()), ("lost", "aborted", ("state", "end_ns"))],
)
def test_the_end_of_the_connection_aborts_all(
    how: str, state: str, estimated: tuple[str, ...]
) -> None:
    talk, wire, tap = Talk(), Wire(), make_tap()
    talk.open()
    talk.ask(BODY)
    talk.ask(BODY)
    packets = talk.packets(wire)
    if how == "lost":
        play(tap, packets)
        tap.forget("clock set")
        parts = tap.flush(START_NS)
    else:
        parts = play(tap, [*packets, wire.fin("server") if how == "fin" else wire.reset("server")])

    assert [(part.state, part.estimated) for part in parts] == [(state, estimated)] * 2


def test_neither_prompt_nor_completion_leaves_the_parser() -> None:
    parts = play(make_tap(), one_stream().packets())

    data = Codec().encode(
        TELEMETRY_REQUESTS,
        Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=parts),
    )

    for text in (b"PROMPT", b"ANSWER", b"text"):
        assert text not in data


def test_a_connection_joined_in_the_middle_is_told_by_its_content() -> None:
    talk = Talk()
    talk.open()
    stream(talk, talk.ask(BODY))
    skipped = len(talk.pieces)
    stream(talk, talk.ask(BODY))
    expected = play(make_tap(), talk.packets())[1]
    tap = make_tap()

    (part,) = play(tap, mid_connection(talk, skipped))

    assert part.endpoint == UNKNOWN_ENDPOINT
    assert part.estimated == ("endpoint", "streaming")
    assert (part.status, part.streaming) == (None, True)
    same = ("state", "model", "prompt_tokens", "completion_tokens", "chunk_deltas_us")
    for name in (*same, "request_bytes", "response_bytes"):
        assert getattr(part, name) == getattr(expected, name)
    assert tap.counts == {"exchanges": 1}


def test_after_a_join_what_is_no_inference_is_not_reported() -> None:
    talk = Talk()
    talk.open()
    skipped = len(talk.pieces)
    for body in (b"vllm:requests 1", b'{"status":"ok"}', b""):
        number = talk.ask(path="/x", method="GET")
        talk.head(number, "text/plain")
        talk.data(number, body, end_stream=True)
    number = talk.ask(BODY)
    talk.head(number, "application/json")
    talk.data(number, b'{"usage":{"completion_tokens":4}}', end_stream=True)
    tap = make_tap()

    (part,) = play(tap, mid_connection(talk, skipped))

    assert (part.streaming, part.completion_tokens) == (False, 4)
    assert tap.counts == {"exchanges": 1, "other requests": 3}
    assert len(tap._ledger) == 0


def test_without_the_library_the_content_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hpack", None)

    (part,) = play(make_tap(), one_stream().packets())

    assert part.estimated == ("endpoint", "streaming")
    assert (part.state, len(times(part)), part.completion_tokens) == ("complete", 2, 2)


def test_headers_that_cannot_be_read_cost_the_headers_only() -> None:
    talk = Talk()
    talk.open()
    mark = len(talk.pieces)
    stream(talk, talk.ask(BODY))
    side, data = talk.pieces[mark]
    talk.pieces[mark] = (side, data[:9] + b"\xff" * (len(data) - 9))
    tap = make_tap()

    (part,) = play(tap, talk.packets())

    assert part.estimated == ("endpoint",)
    assert (part.status, part.state, len(times(part))) == (200, "complete", 2)
    assert tap.counts["unreadable HTTP/2 headers"] == 1


def test_a_hole_inside_data_is_survived_by_the_protocol() -> None:
    reader = h2.FrameReader()
    data = delta(content="x" * 100)
    frame = len(data).to_bytes(3, "big") + bytes([h2.DATA, h2.END_STREAM]) + b"\0\0\0\1" + data

    assert not reader.skip(1)
    pieces = list(reader.feed(1, frame[:30]))
    assert reader.skip(40)
    pieces += reader.feed(2, frame[70:])

    assert [(p.flags, p.stream) for p in pieces] == [(0, 1), (h2.END_STREAM, 1)]
    assert b"".join(p.payload for p in pieces) == data[:21] + data[61:]
    assert not reader.skip(1)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_lost_segment_inside_a_frame_costs_what_it_held(side: str) -> None:
    talk, wire, tap = Talk(), Wire(), make_tap(max_gap_ms=300)
    talk.open()
    number = talk.ask({**BODY, "more": "x" * 600})
    talk.head(number)
    talk.data(
        number, b"".join([delta(content="one"), delta(content="x" * 400), delta(content="2")])
    )
    talk.data(number, delta(content="3"))
    talk.data(number, b"", end_stream=True)
    sizes = [len(data) for who, data in talk.pieces if who == side]
    place = next(
        n for n, piece in enumerate(talk.pieces) if piece[0] == side and len(piece[1]) == max(sizes)
    )
    data = talk.pieces[place][1]
    talk.pieces[place : place + 1] = [
        (side, data[a:b]) for a, b in ((0, 200), (200, 300), (300, 1000))
    ]
    packets = talk.packets(wire)
    del packets[2 + place + 1]

    part = [*play(tap, packets), *tap.flush(START_NS + 1000 * MS)][-1]

    assert part.state == "complete"
    assert tap.counts == {"exchanges": 1, "missing segments": 1}
    if side == "client":
        assert (len(times(part)), part.estimated) == (4, ())
    else:
        assert part.chunks_before + len(times(part)) < 4
        assert "chunk_deltas_us" in part.estimated


def test_streams_are_bounded() -> None:
    talk, tap = Talk(), make_tap(max_streams=2)
    talk.open()
    numbers = [talk.ask(BODY) for _ in range(3)]
    stream(talk, numbers[2])

    assert len(play(tap, talk.packets())) == 2
    assert tap.counts == {"exchanges": 2, "too many HTTP/2 streams": 1}


def test_oversized_headers_give_the_connection_up() -> None:
    talk, tap = Talk(), make_tap()
    talk.open()
    # fragments that never end
    head = (16384).to_bytes(3, "big") + bytes([h2.HEADERS, 0]) + b"\0\0\0\1"
    more = (16384).to_bytes(3, "big") + bytes([h2.CONTINUATION, 0]) + b"\0\0\0\1"
    talk.pieces += [("client", head + bytes(16384)), ("client", more + bytes(16384))]

    assert play(tap, talk.packets()) == []
    assert tap.counts == {"oversized HTTP/2 headers": 1}


@pytest.mark.parametrize(
    "frame",
    [
        (0, h2.DATA, 0, 0, b""),
        (3, h2.RST_STREAM, 0, 1, b"abc"),
        (5, h2.SETTINGS, 0, 0, b"abcde"),
        (6, h2.SETTINGS, 0, 1, b"abcdef"),
        (0, h2.HEADERS, h2.PADDED, 1, b""),
        (1, h2.HEADERS, h2.PADDED | h2.END_HEADERS, 1, b"\xff"),
        (1, h2.DATA, h2.PADDED, 1, b"\xff"),
        (2, h2.CONTINUATION, h2.END_HEADERS, 1, b"ab"),
    ],
)
def test_frames_that_cannot_be_are_refused(frame: tuple[int, int, int, int, bytes]) -> None:
    length, kind, flags, number, payload = frame
    talk, tap = Talk(), make_tap()
    talk.open()
    data = length.to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload
    talk.pieces.append(("client", data))

    assert play(tap, talk.packets()) == []
    assert tap.counts == {"not HTTP/2": 1}


def test_nothing_may_come_between_headers_and_their_continuation() -> None:
    talk, tap = Talk(), make_tap()
    talk.open()
    head = (1).to_bytes(3, "big") + bytes([h2.HEADERS, 0]) + b"\0\0\0\1" + b"\x82"
    ping = (8).to_bytes(3, "big") + bytes([h2.PING, 0]) + bytes(4) + bytes(8)
    talk.pieces.append(("client", head + ping))

    assert play(tap, talk.packets()) == []
    assert tap.counts == {"not HTTP/2": 1}


def test_a_larger_table_is_used_when_it_was_permitted() -> None:
    talk = Talk()
    talk.open()
    talk.client.update_settings({h2.HEADER_TABLE_SIZE: 8192})
    talk.flush()
    talk.flush()
    talk.server.encoder.header_table_size = 8192
    stream(talk, talk.ask(BODY))
    tap = make_tap()

    (part,) = play(tap, talk.packets())

    assert (part.status, part.estimated) == (200, ())
    assert tap.counts == {"exchanges": 1}


def test_a_server_may_speak_first() -> None:
    talk = Talk()
    talk.server.initiate_connection()
    talk.pieces.append(("server", talk.server.data_to_send()))
    talk.client.initiate_connection()
    talk.flush()
    stream(talk, talk.ask(BODY))

    (part,) = play(make_tap(), talk.packets())

    assert (part.status, part.estimated) == (200, ())


def test_an_upgrade_from_http1_is_counted_and_what_follows_is_timed() -> None:
    talk, wire, tap = Talk(), Wire(), make_tap()
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    upgrade = request(BODY, headers=["Connection: Upgrade", "Upgrade: h2c"])
    packets = [*wire.syn(), wire.client(upgrade), wire.server(switch)]
    talk.open()
    stream(talk, talk.ask(BODY))
    packets += [wire.packet(side, data) for side, data in talk.pieces]

    old, new = play(tap, packets)

    assert (old.state, old.estimated) == ("aborted", ("state", "end_ns"))
    assert (new.state, new.endpoint, new.status) == ("complete", "/v1/chat/completions", None)
    assert new.estimated == ("streaming",)
    assert tap.counts["upgraded connections"] == 1


def test_plain_http_is_still_http1() -> None:
    wire, tap = Wire(), make_tap()

    (part,) = play(tap, [*wire.syn(), wire.client(request(BODY)), wire.server(answer(b"{}"))])

    assert (part.state, part.endpoint) == ("complete", "/v1/chat/completions")


def cut(pieces: list[tuple[str, bytes]], choice: random.Random) -> list[tuple[str, bytes]]:
    found = []
    for side, data in pieces:
        edges = sorted({0, len(data), *(choice.randrange(len(data)) for _ in range(3))})
        found += [(side, data[a:b]) for a, b in pairwise(edges)]
    return found


@given(seed=st.integers(0, 10_000), padding=st.none() | st.integers(0, 255))
def test_any_cut_of_the_bytes_gives_the_same(seed: int, padding: int | None) -> None:
    talk = one_stream(padding=padding)
    (expected,) = play(make_tap(), talk.packets())
    talk.pieces = cut(talk.pieces, random.Random(seed))
    while len(talk.pieces[0][1]) < 3:  # what tells the protocol comes in one piece
        talk.pieces[:2] = [("client", talk.pieces[0][1] + talk.pieces[1][1])]

    (part,) = play(make_tap(), talk.packets())

    assert facts(part) == facts(expected)


@given(
    seed=st.integers(0, 1000),
    garbage=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["client", "server"]), st.binary(max_size=60))
    ),
    flips=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400), st.integers(0, 255))),
)
def test_garbage_among_frames_never_raises(
    seed: int, garbage: list[tuple[int, str, bytes]], flips: list[tuple[int, int, int]]
) -> None:
    talk, tap = one_stream(), make_tap()
    for place, at, value in flips:
        side, data = talk.pieces[place % len(talk.pieces)]
        changed = bytearray(data)
        changed[at % len(data)] = value
        talk.pieces[place % len(talk.pieces)] = side, bytes(changed)
    for place, side, data in garbage:
        talk.pieces.insert(place % len(talk.pieces), (side, data))
    talk.pieces = cut([piece for piece in talk.pieces if piece[1]], random.Random(seed))

    play(tap, talk.packets())

    assert len(tap) <= 1
    check_places(tap)


def check_places(tap: Tap) -> None:
    """Whatever happened, no place in the ledger is lost."""
    tap.forget("end of the test")
    tap.flush(START_NS)
    assert len(tap._ledger) == 0
