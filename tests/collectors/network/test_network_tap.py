import json
import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import (
    DONE,
    INSTANCE,
    MS,
    ROLE,
    START_NS,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    answer,
    chunk,
    delta,
    event,
    ip_packet,
    make_tap,
    play,
    request,
    usage,
)

from latencyprism.collectors.network.frames import ACK, SYN
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

BODY = {
    "model": "m",
    "stream": True,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "PROMPT text"}],
}
STREAM = [
    STREAM_HEAD,
    chunk(ROLE),
    chunk(delta(content="ANSWER")),
    chunk(delta(content=" text")),
    chunk(usage(11, 2, 4)),
    chunk(DONE),
    STREAM_END,
]


def times(part: RequestTiming) -> list[int]:
    """Times of the content events of a part, ns; each within a microsecond."""
    if part.chunk_base_ns is None:
        return []
    deltas = [0, *accumulate(part.chunk_deltas_us)]
    return [part.chunk_base_ns + delta_us * 1000 for delta_us in deltas]


def stream_packets(wire: Wire | None = None) -> list[bytes]:
    wire = wire or Wire()
    return [*wire.syn(), wire.client(request(BODY)), *map(wire.server, STREAM)]


def test_a_streamed_answer() -> None:
    tap = make_tap()

    parts = play(tap, stream_packets())

    at = [START_NS + index * MS for index in range(20)]
    assert parts == [
        RequestTiming(
            request_id=parts[0].request_id,
            part=0,
            state="complete",
            instance=INSTANCE,
            source="network",
            observed_at_ns=at[9],
            endpoint="/v1/chat/completions",
            model="m",
            streaming=True,
            status=200,
            arrival_ns=at[2],
            request_end_ns=at[2],
            first_byte_ns=at[3],
            first_token_ns=at[5],
            end_ns=at[9],
            chunks_before=0,
            chunk_base_ns=at[5],
            chunk_deltas_us=(1000,),
            request_bytes=len(json.dumps(BODY)),
            response_bytes=len(ROLE + usage(11, 2, 4) + DONE) + len(b"".join(STREAM[2:4])) - 2 * 6,
            prompt_tokens=11,
            cached_tokens=4,
            completion_tokens=2,
            method="POST",
            max_tokens=16,
        )
    ]
    assert len(parts[0].request_id) == 32


def test_parts_carry_only_their_news() -> None:
    tap, packets = make_tap(), stream_packets()

    parts = [part for index, packet in enumerate(packets) for part in play_one(tap, index, packet)]

    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.state for part in parts] == ["open"] * (len(parts) - 1) + ["complete"]
    assert len({part.request_id for part in parts}) == 1
    assert [at for part in parts for at in times(part)] == [START_NS + i * MS for i in (5, 6)]
    before = [0, *accumulate(len(times(part)) for part in parts)]
    assert [part.chunks_before for part in parts] == before[:-1]
    assert parts[0].request_end_ns == parts[0].observed_at_ns == START_NS + 2 * MS
    assert (parts[0].status, parts[0].streaming, parts[0].response_bytes) == (None, None, None)


def play_one(tap: Tap, index: int, packet: bytes) -> list[RequestTiming]:
    return play(tap, [packet], start_ns=START_NS + index * MS)


def test_neither_prompt_nor_completion_leaves_the_parser() -> None:
    parts = play(make_tap(), stream_packets())
    pack = Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=parts)

    data = Codec().encode(TELEMETRY_REQUESTS, pack)

    assert Codec().decode(TELEMETRY_REQUESTS, data).samples == tuple(parts)
    for text in (b"PROMPT", b"ANSWER", b"text"):
        assert text not in data


@pytest.mark.parametrize(
    ("path", "body", "events", "expected"),
    [
        (
            "/v1/completions",
            {"model": "m", "prompt": [1, 2, 3]},
            [event({"choices": [{"text": "a"}]}), event({"choices": [{"text": ""}]}), DONE],
            ("m", 1, 3, None, None),
        ),
        (
            "/generate_stream",
            {"inputs": "PROMPT"},
            [
                b'data:{"index":1,"token":{"id":5,"text":"a"},"generated_text":null}\n\n',
                b'data:{"index":2,"token":{"id":6,"text":"b"},"generated_text":"ab",'
                b'"details":{"finish_reason":"length","generated_tokens":2,"input_length":9}}\n\n',
            ],
            (None, 2, 9, None, 2),
        ),
        (
            "/generate",
            {"text": "PROMPT", "stream": True},
            [
                event({"text": "a", "meta_info": {"prompt_tokens": 9, "completion_tokens": 1}}),
                event(
                    {
                        "text": "ab",
                        "meta_info": {
                            "prompt_tokens": 9,
                            "completion_tokens": 2,
                            "cached_tokens": 8,
                        },
                    }
                ),
                DONE,
            ],
            (None, 2, 9, 8, 2),
        ),
        (
            "/completion",
            {"prompt": "PROMPT", "stream": True},
            [
                event({"content": "a", "stop": False, "tokens_predicted": 1}),
                event(
                    {
                        "content": "",
                        "stop": True,
                        "model": "llama.gguf",
                        "tokens_predicted": 2,
                        "tokens_evaluated": 9,
                        "timings": {"cache_n": 5, "prompt_n": 4},
                    }
                ),
            ],
            (None, 1, 9, 5, 2),
        ),
        (
            "/prefix/v1/chat/completions?key=1",
            {"messages": []},
            [delta(content="a")],
            ("m", 1, None, None, None),
        ),
    ],
    ids=["completions", "tgi", "sglang", "llama.cpp", "prefix and query"],
)
def test_formats(
    path: str, body: dict[str, Any], events: list[bytes], expected: tuple[Any, ...]
) -> None:
    wire = Wire()
    stream = b"".join(map(chunk, events))

    (part,) = play(
        make_tap(),
        [
            *wire.syn(),
            wire.client(request(body, path=path)),
            wire.server(STREAM_HEAD + stream + STREAM_END),
        ],
    )

    chunks = len(times(part))
    got = (part.model, chunks, part.prompt_tokens, part.cached_tokens, part.completion_tokens)
    assert got == expected
    assert part.endpoint == path.partition("?")[0]
    assert part.state == "complete"


@pytest.mark.parametrize("origin", ["http://engine:8000", "https://user:hunter2@engine"])
def test_of_a_whole_url_the_path_is_told(origin: str) -> None:
    wire = Wire()
    asked = request({}, path=f"{origin}/v1/completions?x=http://a/b")

    (part,) = play(make_tap(), [*wire.syn(), wire.client(asked)])

    assert part.endpoint == "/v1/completions"


def test_an_answer_that_is_no_stream_has_no_first_token() -> None:
    wire = Wire()
    body = {"model": "real", "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    packets = [
        *wire.syn(),
        wire.client(request({"messages": []})),
        wire.server(answer(json.dumps(body).encode())),
    ]

    (part,) = play(make_tap(), packets)

    assert (part.first_token_ns, part.chunk_base_ns, part.streaming) == (None, None, False)
    assert (part.end_ns, part.state, part.status) == (START_NS + 3 * MS, "complete", 200)
    assert (part.prompt_tokens, part.completion_tokens, part.model) == (5, 7, "real")


def test_a_refused_request_is_complete_with_its_status() -> None:
    wire = Wire()
    error = answer(b'{"error":{"message":"busy"}}', status="429 Too Many Requests")

    (part,) = play(make_tap(), [*wire.syn(), wire.client(request(BODY)), wire.server(error)])

    assert (part.state, part.status, part.streaming) == ("complete", 429, False)


def test_an_answer_before_the_request_has_ended() -> None:
    wire = Wire()
    body = request(BODY)
    early = answer(b"{}", status="413 Content Too Large")

    parts = play(
        make_tap(),
        [*wire.syn(), wire.client(body[:-5]), wire.server(early), wire.client(body[-5:])],
    )

    assert [(p.state, p.status, p.request_end_ns) for p in parts] == [("complete", 413, None)]


def test_interim_answers_are_no_answers() -> None:
    wire = Wire()
    packets = [
        *wire.syn(),
        wire.client(request(BODY, headers=["Expect: 100-continue"])),
        wire.server(b"HTTP/1.1 100 Continue\r\n\r\n"),
        wire.server(answer(b"{}")),
    ]

    (part,) = play(make_tap(), packets)

    assert (part.status, part.first_byte_ns) == (200, START_NS + 4 * MS)


def test_keep_alive_and_pipelining() -> None:
    wire = Wire()
    two = request(BODY) + request(BODY, path="/v1/completions")
    packets = [
        *wire.syn(),
        wire.client(request(BODY)),
        wire.server(answer(b"{}")),
        wire.client(two),
        wire.server(answer(b"{}") + answer(b"{}", status="500 Oops")),
    ]

    parts = play(make_tap(), packets)

    assert [(p.endpoint, p.status, p.state) for p in parts] == [
        ("/v1/chat/completions", 200, "complete"),
        ("/v1/chat/completions", 200, "complete"),
        ("/v1/completions", 500, "complete"),
    ]
    assert parts[1].arrival_ns == parts[2].arrival_ns
    assert len({p.request_id for p in parts}) == 3


def test_other_paths_are_counted_and_keep_their_place() -> None:
    wire, tap = Wire(), make_tap()
    packets = [
        *wire.syn(),
        wire.client(
            request(path="/metrics", method="GET")
            + request(path="/health", method="HEAD")
            + request(BODY)
        ),
        wire.server(answer(b'{"content":"no"}')),
        wire.server(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        wire.server(b"".join(STREAM)),
    ]

    (part,) = play(tap, packets)

    assert (part.state, len(times(part))) == ("complete", 2)
    assert tap.counts["other requests"] == 2


def test_head_with_an_empty_body_ends_once() -> None:
    wire, tap = Wire(), make_tap()
    packets = [
        *wire.syn(),
        wire.client(request(path="/health", method="HEAD") + request(BODY)),
        wire.server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        wire.server(b"".join(STREAM)),
    ]

    (part,) = play(tap, packets)

    assert part.state == "complete"


@pytest.mark.parametrize("size", [1, 40, 10_000])
def test_a_request_that_asks_for_an_upgrade_which_the_server_ignores(size: int) -> None:
    wire, tap = Wire(), make_tap()
    upgrade = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]
    bytes_sent = request(BODY, headers=upgrade) + request(BODY)
    pieces = [bytes_sent[at : at + size] for at in range(0, len(bytes_sent), size)]
    packets = [
        *wire.syn(),
        *map(wire.client, pieces),
        *map(wire.server, STREAM),
        *map(wire.server, STREAM),
    ]

    parts = play(tap, packets)

    assert [(p.state, p.request_bytes, p.model) for p in parts] == [
        ("complete", len(json.dumps(BODY)), "m")
    ] * 2


def test_an_upgraded_connection_is_counted_and_left() -> None:
    wire, tap = Wire(), make_tap()
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    packets = [*wire.syn(), wire.client(request(BODY)), wire.server(switch), wire.server(b"\0\1")]

    (part,) = play(tap, packets)

    assert (part.state, part.estimated) == ("aborted", ("state", "end_ns"))
    assert tap.counts["upgraded connections"] == 1


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (["traceparent: 00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"], "ab" * 16),
        (["x-request-id: " + "12" * 16], None),
        (["traceparent: nonsense"], None),
    ],
)
def test_trace_id(headers: list[str], expected: str | None) -> None:
    wire = Wire()

    (part,) = play(make_tap(), [*wire.syn(), wire.client(request(BODY, headers=headers))])

    assert part.trace_id == expected


def test_a_compressed_answer_is_timed_without_its_events() -> None:
    wire, tap = Wire(), make_tap()
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    packets = [*wire.syn(), wire.client(request(BODY)), wire.server(head + b"".join(STREAM[1:]))]

    (part,) = play(tap, packets)

    assert (part.state, part.streaming, part.first_token_ns) == ("complete", True, None)
    assert tap.counts["compressed answers"] == 1


@pytest.mark.parametrize("ending", ["client fin", "server fin", "client reset", "server reset"])
def test_a_connection_that_ends_before_the_answer_aborts_it(ending: str) -> None:
    wire = Wire()
    side, how = ending.split()
    packets = [
        *wire.syn(),
        wire.client(request(BODY)),
        wire.server(b"".join(STREAM[:3])),
        wire.fin(side) if how == "fin" else wire.reset(side),
        wire.server(STREAM[3]),  # what was still under way belongs to nobody
    ]

    (part,) = play(make_tap(), packets)

    assert (part.state, part.end_ns, part.estimated) == ("aborted", START_NS + 4 * MS, ())
    assert len(times(part)) == 1


def test_a_stream_that_said_done_is_complete_however_it_ends() -> None:
    wire = Wire()
    packets = [
        *wire.syn(),
        wire.client(request(BODY)),
        wire.server(b"".join(STREAM[:-1])),
        wire.reset("client"),
    ]

    (part,) = play(make_tap(), packets)

    assert part.state == "complete"


@pytest.mark.parametrize(("side", "state"), [("server", "complete"), ("client", "aborted")])
def test_an_answer_without_a_length_ends_with_its_connection(side: str, state: str) -> None:
    wire = Wire()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    packets = [
        *wire.syn(),
        wire.client(request(BODY)),
        wire.server(head + delta(content="a")),
        wire.fin(side),
    ]

    (part,) = play(make_tap(), packets)

    assert (part.state, len(times(part))) == (state, 1)


def test_a_fin_waits_for_what_comes_before_it() -> None:
    wire = Wire()
    packets = [*wire.syn(), wire.client(request(BODY)), wire.server(STREAM[0])]
    rest, fin = wire.server(b"".join(STREAM[1:])), wire.fin("server")

    (part,) = play(make_tap(), [*packets, fin, rest])

    assert (part.state, part.estimated) == ("complete", ())


def test_joins_a_connection_at_its_next_request() -> None:
    wire, tap = Wire(), make_tap()
    packets = [
        wire.client(b'rest of a body"}'),
        wire.server(chunk(delta(content="old"))),
        wire.server(STREAM_END),
        wire.client(request(BODY)),
        *map(wire.server, STREAM),
    ]

    (part,) = play(tap, packets)

    assert (part.state, len(times(part))) == ("complete", 2)
    assert tap.counts == {"exchanges": 1}


def test_an_old_answer_after_a_join_is_not_taken_for_the_new_one() -> None:
    wire = Wire()
    packets = [
        wire.client(request(BODY)),
        wire.server(chunk(delta(content="old"))),
        *map(wire.server, STREAM),
    ]

    (part,) = play(make_tap(), packets)

    assert times(part) == [START_NS + 4 * MS, START_NS + 5 * MS]


def test_a_port_used_again_is_a_new_connection() -> None:
    first, again = Wire(), Wire(next={"client": 77, "server": 99})
    packets = [*first.syn(), first.client(request(BODY)), *stream_packets(again)]

    parts = play(make_tap(), packets)

    assert [p.state for p in parts] == ["aborted", "complete"]


def test_repeated_handshakes_and_segments_change_nothing() -> None:
    once = play(make_tap(), stream_packets())
    tap = make_tap()

    for index, packet in enumerate(stream_packets()):
        for _ in range(2):  # as a bridge and its port show the same packet
            tap.packet(START_NS + index * MS, packet, 0, len(packet))

    assert tap.flush(START_NS + 100 * MS) == once


def test_a_missing_segment_is_waited_for_and_then_passed_over() -> None:
    tap = make_tap(max_gap_ms=300)
    packets = stream_packets()
    del packets[5]

    (part,) = play(tap, packets)
    assert (part.state, part.first_token_ns) == ("open", None)
    (part,) = tap.flush(START_NS + 400 * MS)

    assert part.state == "complete"
    assert times(part) == [START_NS + 5 * MS]  # when it came, not when the wait ended
    assert part.end_ns == START_NS + 8 * MS
    assert (part.prompt_tokens, part.completion_tokens) == (11, 2)
    assert set(part.estimated) == {
        "response_bytes",
        "chunks_before",
        "chunk_deltas_us",
        "first_token_ns",
    }
    assert tap.counts == {"exchanges": 1, "missing segments": 1, "resynced exchanges": 1}


def test_a_lost_head_cannot_be_passed_over() -> None:
    tap = make_tap()
    packets = stream_packets()
    del packets[3]
    play(tap, packets)

    (part,) = tap.flush(START_NS + 400 * MS)

    assert (part.state, part.estimated) == ("aborted", ("state", "end_ns"))
    assert part.end_ns == START_NS + 2 * MS  # the last that is known for sure
    assert tap.counts == {"exchanges": 1, "missing segments": 1}


def test_after_a_hole_the_connection_is_picked_up_at_its_next_request() -> None:
    wire, tap = Wire(), make_tap()
    packets = stream_packets(wire)
    del packets[3]
    play(tap, packets)
    tap.flush(START_NS + 400 * MS)

    packets = [wire.client(request(BODY)), *map(wire.server, STREAM)]
    (part,) = play(tap, packets, start_ns=START_NS + 500 * MS)

    assert (part.state, len(times(part))) == ("complete", 2)


def test_too_much_behind_a_hole_is_given_up_at_once() -> None:
    wire, tap = Wire(), make_tap(max_held_bytes=5000)
    packets = [*wire.syn(), wire.client(request(BODY))]
    wire.server(STREAM_HEAD)  # lost
    packets += [wire.server(chunk(b"x" * 1000)) for _ in range(6)]

    (part,) = play(tap, packets)

    assert part.state == "aborted"
    assert tap.counts["missing segments"] == 1


def test_holes_in_many_connections_are_bounded() -> None:
    tap = make_tap(max_gaps=2)
    wires = [Wire(client_end=("127.0.0.1", 40000 + n)) for n in range(4)]
    packets = []
    for wire in wires:
        packets += [*wire.syn(), wire.client(request(BODY))]
        wire.server(STREAM_HEAD)  # lost
        packets.append(wire.server(chunk(DONE)))

    parts = play(tap, packets)

    assert [p.state for p in parts].count("aborted") == 2
    assert tap.counts["missing segments"] == 2


def test_lost_packets_make_silent_exchanges_doubtful() -> None:
    tap = make_tap(max_silence_s=5.0)
    wires = [Wire(client_end=("127.0.0.1", 40000 + n)) for n in range(2)]
    for wire in wires:
        play(tap, [*wire.syn(), wire.client(request(BODY)), wire.server(STREAM_HEAD)])

    tap.packets_lost(7, START_NS + 10 * MS)
    (alive,) = play(tap, [wires[0].server(STREAM[1] + STREAM[2])], start_ns=START_NS + 20 * MS)
    parts = tap.flush(START_NS + 6000 * MS)

    assert alive.state == "open"
    assert [(p.state, p.estimated) for p in parts] == [("aborted", ("state", "end_ns"))]
    assert parts[0].request_id != alive.request_id
    assert tap.counts["lost packets"] == 7


def test_forgetting_closes_everything_as_a_guess() -> None:
    wire, tap = Wire(), make_tap()
    play(tap, [*wire.syn(), wire.client(request(BODY)), wire.server(STREAM_HEAD)])

    tap.forget("clock set")

    (part,) = tap.flush(START_NS)
    assert (part.state, part.estimated) == ("aborted", ("state", "end_ns"))
    packets = [wire.client(request(BODY)), *map(wire.server, STREAM)]
    (part,) = play(tap, packets, start_ns=START_NS - 1000 * MS)
    assert (part.state, part.arrival_ns) == ("complete", START_NS - 1000 * MS)


def test_connections_are_bounded_and_a_silent_one_goes() -> None:
    tap = make_tap(max_connections=3)
    wires = [Wire(client_end=("127.0.0.1", 40000 + n)) for n in range(5)]
    opened = [[*wire.syn(), wire.client(request(BODY)), wire.server(STREAM_HEAD)] for wire in wires]

    parts = play(tap, [p for packets in opened[:4] for p in packets])
    parts += play(tap, [wires[1].server(STREAM[1]), *opened[4]], start_ns=START_NS + 100 * MS)

    gone = [part.arrival_ns for part in parts if part.state == "aborted"]
    assert gone == [START_NS + 2 * MS, START_NS + 10 * MS]  # the first, then the third
    assert len(tap) == 3
    assert tap.counts["connection limit"] == 2


def test_open_exchanges_are_bounded() -> None:
    wire, tap = Wire(), make_tap(max_exchanges=1)
    packets = [
        *wire.syn(),
        wire.client(request(BODY) + request(BODY)),
        wire.server(answer(b"{}") + answer(b"{}")),
    ]

    assert len(play(tap, packets)) == 1
    assert tap.counts["too many exchanges"] == 1
    (later,) = play(tap, [wire.client(request(BODY)), wire.server(answer(b"{}"))])
    assert later.state == "complete"


def test_pipelining_is_bounded() -> None:
    wire, tap = Wire(), make_tap(max_pipelined=2)

    parts = play(tap, [*wire.syn(), wire.client(request(BODY) * 3)])

    assert [p.state for p in parts] == ["aborted", "aborted"]
    assert tap.counts["too many pipelined requests"] == 1


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", "TLS connections"),
        (b"PRI * HTTP/3", "not HTTP/2"),
        (b"\x00\x01garbage", "not HTTP/1.1"),
    ],
)
def test_other_protocols_are_counted_once(data: bytes, name: str) -> None:
    wire, tap = Wire(), make_tap()

    assert play(tap, [*wire.syn(), wire.client(data), wire.client(data), wire.server(data)]) == []
    assert tap.counts == {name: 1}


def test_an_answer_nobody_asked_for_is_counted() -> None:
    wire, tap = Wire(), make_tap()
    packets = [
        *wire.syn(),
        wire.client(request(path="/metrics", method="GET")),
        wire.server(answer(b"x") + answer(b"x")),
    ]

    assert play(tap, packets) == []
    assert tap.counts["answers without a request"] == 1
    packets = [wire.client(request(BODY)), *map(wire.server, STREAM)]
    assert [p.state for p in play(tap, packets)] == ["complete"]


def test_each_instance_gets_its_own() -> None:
    tap = make_tap("127.0.0.1:8000", "127.0.0.1:9000", "[::1]:8000", "10.9.9.9:7000")
    wires = [
        Wire(server_end=("127.0.0.1", 8000)),
        Wire(server_end=("127.0.0.1", 9000)),
        Wire(client_end=("::1", 5), server_end=("::1", 8000)),
        Wire(client_end=("10.1.1.1", 5), server_end=("10.9.9.9", 7000)),
        Wire(server_end=("127.0.0.1", 8001)),
    ]
    packets = [p for wire in wires for p in stream_packets(wire)]

    parts = play(tap, packets)

    assert [p.instance for p in parts] == [
        "127.0.0.1:8000",
        "127.0.0.1:9000",
        "[::1]:8000",
        "10.9.9.9:7000",
    ]


def test_times_do_not_go_back() -> None:
    tap, packets = make_tap(), stream_packets()

    for index, packet in enumerate(packets):
        at = START_NS + (index - 3 * (index % 2)) * MS
        tap.packet(at, packet, 0, len(packet))
    (part,) = tap.flush(START_NS + 100 * MS)

    assert all(delta_us >= 0 for delta_us in part.chunk_deltas_us)
    assert part.end_ns is not None
    assert part.arrival_ns <= part.end_ns


@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=60),
    seed=st.integers(0, 1000),
    window=st.integers(1, 6),
)
def test_any_cut_order_and_repetition_of_segments_gives_the_same_exchange(
    cuts: list[int], seed: int, window: int
) -> None:
    expected = play(make_tap(), stream_packets())[0]
    client, server = request(BODY), b"".join(STREAM)
    wire, tap = Wire(), make_tap()
    handshake = wire.syn()
    packets = [*map(wire.client, slices(client, cuts)), *map(wire.server, slices(server, cuts))]
    choice = random.Random(seed)
    packets += choice.choices(packets, k=3)
    order = sorted(range(len(packets)), key=lambda i: i + choice.uniform(0, window))
    # a request does not come after its answer
    packets = sorted((packets[i] for i in order), key=lambda p: p[20:22] != client_port())

    (part,) = play(tap, [*handshake, *packets])

    assert facts(part) == facts(expected)
    assert len(times(part)) == len(times(expected))


def slices(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % len(data) for c in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def client_port() -> bytes:
    return (40000).to_bytes(2, "big")


def facts(part: RequestTiming) -> tuple[Any, ...]:
    return (
        part.state,
        part.status,
        part.streaming,
        part.model,
        part.request_bytes,
        part.response_bytes,
        part.prompt_tokens,
        part.cached_tokens,
        part.completion_tokens,
    )


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=80), st.integers(0, 255)), max_size=20))
def test_garbage_in_packets_never_raises(pieces: list[tuple[bool, bytes, int]]) -> None:
    wire, tap = Wire(), make_tap()
    packets = wire.syn()
    for from_client, payload, flags in pieces:
        packets.append(wire.packet("client" if from_client else "server", payload, flags))

    play(tap, packets)

    assert len(tap) <= 1


@given(
    st.lists(
        st.sampled_from([request(BODY), request(path="/health", method="HEAD"), *STREAM])
        | st.binary(max_size=30),
        max_size=12,
    ),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_messages_in_the_wrong_places_never_raise(
    messages: list[bytes], from_client: list[bool]
) -> None:
    wire, tap = Wire(), make_tap()
    handshake = wire.syn()
    packets = [
        wire.packet("client" if side else "server", message)
        for message, side in zip(messages, from_client, strict=False)
    ]

    play(tap, [*handshake, *packets])

    assert len(tap) <= 1


@given(st.binary(max_size=100))
def test_any_packet_is_survived(packet: bytes) -> None:
    tap = make_tap()

    tap.packet(START_NS, packet, 0, len(packet))

    assert tap.flush(START_NS) == []


def test_a_syn_alone_is_no_exchange() -> None:
    tap = make_tap()
    packets = [ip_packet(("127.0.0.1", port), ("127.0.0.1", 8000), flags=SYN) for port in (1, 2, 3)]

    assert play(tap, [*packets, ip_packet(("127.0.0.1", 8000), ("127.0.0.1", 9), flags=ACK)]) == []
    assert len(tap) == 3
