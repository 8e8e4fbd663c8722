"""What is read of vLLM's messages, and how pieces of a connection become messages."""

import gzip
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_frames import Engine as FakeEngine
from kernel_frames import array, frame, integer, text

from latencyprism.collectors.kernel import programs
from latencyprism.collectors.kernel.frames import (
    MAX_FRAME_BYTES,
    V0_32,
    Aborted,
    Added,
    Messages,
    decode_inbound,
    decode_outputs,
    layout_of,
)
from latencyprism.collectors.kernel.msgpack import CutError, ShapeError

NOW_NS = 5_000_000_000


def body(framed: bytes) -> bytes:
    return framed[9 if framed[0] & 2 else 2 :]


def recorded() -> Iterator[tuple[int, int, int, int, bytes]]:
    """Time, descriptor, length, direction and first bytes of each event of the recording."""
    data = gzip.decompress((Path(__file__).parent / "data/vllm-0.32-frames.gz").read_bytes())
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("=I", data, at)
        event = data[at + 4 : at + 4 + size]
        at_ns, _, descriptor, length, direction, _ = struct.unpack_from("=QIIIIQ", event)
        yield at_ns, descriptor, length, direction, event[programs.EVENT_HEADER :]
        at += 4 + size


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "v0.32.0", "0.32.0rc1", "0.32"])
def test_known_versions_have_a_layout(version: str) -> None:
    assert layout_of(version) is V0_32


@pytest.mark.parametrize("version", ["0.31.0", "0.320.1", "1.0.0", "", "dev", "0.32x", "0.33.0"])
def test_other_versions_have_none(version: str) -> None:
    assert layout_of(version) is None


def test_a_step_is_read_as_counts_and_times() -> None:
    fake = FakeEngine(NOW_NS)
    sent = fake.step(
        {"cmpl-old": 2, "cmpl-new": 1},
        joined={"cmpl-new": 500},
        cached=384,
        finished=["cmpl-old"],
        waited_ns=2_000_000,
        took_ns=30_000_000,
    )

    outputs = decode_outputs(body(sent), V0_32)

    assert outputs.at_ns == pytest.approx(NOW_NS, abs=2)
    assert outputs.active == 1
    old, new = outputs.outputs
    assert (old.request, old.tokens, old.finished, old.prompt_tokens) == (
        b"cmpl-old",
        2,
        True,
        None,
    )
    assert (new.tokens, new.finished, new.prompt_tokens, new.computed_tokens) == (
        1,
        False,
        500,
        116,
    )
    assert new.scheduled_ns == pytest.approx(NOW_NS - 30_000_000, abs=2)
    assert new.queued_ns == pytest.approx(NOW_NS - 32_000_000, abs=2)


@pytest.mark.parametrize(
    "request_id", ["a", "cmpl-" + "7" * 26, "cmpl-" + "7" * 27, "x" * 200, "é"]
)
def test_outputs_of_one_token_are_read_alike_whatever_their_request(request_id: str) -> None:
    sent = FakeEngine(NOW_NS).step({request_id: 1, "two": 2})

    outputs = decode_outputs(body(sent), V0_32)

    told = dict.fromkeys(outputs.plain, 1)
    told |= {output.request: output.tokens for output in outputs.outputs}
    assert told == {request_id.encode(): 1, b"two": 2}
    assert len(outputs.plain) == request_id.isascii()


@pytest.mark.parametrize("token", [b"\x07", b"\xcc\x91", b"\xcd\x0a\xce", b"\xce\x00\x01\x0a\x0a"])
def test_token_ids_of_any_width_are_counted(token: bytes) -> None:
    output = array([text("r"), array([token]), *[b"\xc0"] * 11, integer(0), *[b"\xc0"] * 4])
    message = array(
        [integer(0), array([output, output]), b"\xc0", b"\xcb" + bytes(8), *[b"\xc0"] * 5]
    )

    assert decode_outputs(message, V0_32).plain == (b"r", b"r")


def test_the_recorded_engine_is_read_whole() -> None:
    counts: Counter[str] = Counter()
    streams: dict[int, Messages] = {}
    tokens = frames = 0
    for _, descriptor, length, direction, data in recorded():
        if direction == programs.OUTBOUND:
            stream = streams.setdefault(descriptor, Messages(counts))
            for message in stream.add(data, length):
                outputs = decode_outputs(message, V0_32)
                tokens += len(outputs.plain)
                tokens += sum(output.tokens for output in outputs.outputs)
                frames += 1

    assert tokens == 592
    assert frames >= 225
    assert not counts


def test_requests_are_read_from_their_first_bytes() -> None:
    sent = FakeEngine(NOW_NS).add("cmpl-af695e44d7160afe-0-87c89010", prompt=1700)

    added = decode_inbound(sent[: programs.INBOUND_BYTES], V0_32)

    assert added == [Added(request=b"cmpl-af695e44d7160afe-0-87c89010", prompt_tokens=1700)]


def test_the_recorded_requests_are_read() -> None:
    inbound = [data for _, _, _, direction, data in recorded() if direction == programs.INBOUND]

    messages = [message for data in inbound for message in decode_inbound(data, V0_32)]

    assert sum(isinstance(message, Added) for message in messages) == 11
    assert sum(isinstance(message, Aborted) for message in messages) == 1


def test_requests_given_up_at_once_are_read_as_far_as_they_were_read() -> None:
    fake = FakeEngine(NOW_NS)
    requests = [f"cmpl-{number:032d}" for number in range(9)]
    apart = b"".join(fake.abort(request) for request in requests)

    one = decode_inbound(fake.abort(*requests)[: programs.INBOUND_BYTES], V0_32)
    several = decode_inbound(apart[: programs.INBOUND_BYTES], V0_32)

    assert one == [Aborted(requests=tuple(request.encode() for request in requests[:6]))]
    assert several == [Aborted(requests=(request.encode(),)) for request in requests[:5]]


@pytest.mark.parametrize("data", [b"", b"\x01\x01\x02" + bytes(20), b"\x00\x01\x00", b"\xff" * 64])
def test_other_messages_to_the_engine_are_none_of_ours(data: bytes) -> None:
    assert decode_inbound(data, V0_32) == []


def test_a_message_of_another_layout_is_refused() -> None:
    with pytest.raises(ShapeError):
        decode_outputs(array([integer(0)] * 7), V0_32)
    with pytest.raises(ShapeError):
        decode_outputs(array([integer(0), array([array([text("x")])]), *[b"\xc0"] * 7]), V0_32)
    with pytest.raises(ShapeError):
        decode_inbound(frame(b"\x00", more=True) + frame(array([text("x")] * 3)), V0_32)


@given(st.data())
def test_any_damage_is_refused_or_changes_counts_only(data: st.DataObject) -> None:
    message = bytearray(body(FakeEngine(NOW_NS).step({"a": 1, "b": 3}, joined={"b": 40})))
    for _ in range(data.draw(st.integers(1, 5))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))]

    try:
        decode_outputs(bytes(message), V0_32)
    except (CutError, ShapeError):
        return


@given(st.lists(st.integers(1, 600), min_size=1, max_size=8), st.data())
def test_messages_come_out_whole_however_they_were_cut(
    sizes: list[int], data: st.DataObject
) -> None:
    messages = [bytes((number % 256,)) * size for number, size in enumerate(sizes)]
    stream = b"".join(map(frame, messages))
    # Cuts inside a frame's header do not come from ZeroMQ, which writes it at once
    starts = {0}
    for message in messages:
        starts.add(max(starts) + len(frame(message)))
    header = {start + inside for start in starts for inside in range(1, 9)}
    places = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6))
    cuts = [0, *sorted(places - header), len(stream)]
    counts: Counter[str] = Counter()
    connection = Messages(counts)

    found = [
        message
        for start, end in pairwise(cuts)
        for message in connection.add(stream[start:end], end - start)
    ]

    assert found == messages
    assert not counts


def test_a_message_that_was_read_in_part_is_passed_over_and_the_next_is_found() -> None:
    counts: Counter[str] = Counter()
    connection = Messages(counts)
    long, short = frame(b"a" * 1000), frame(b"b" * 20)

    assert connection.add(long[:100], len(long)) == []
    assert connection.add(short, len(short)) == [b"b" * 20]
    assert counts == {"frames cut": 1}


def test_what_follows_unread_bytes_in_the_same_piece_is_lost_and_counted() -> None:
    counts: Counter[str] = Counter()
    connection = Messages(counts)
    piece = frame(b"a" * 1000) + frame(b"b" * 20)

    assert connection.add(piece[:100], len(piece)) == []
    assert connection.add(frame(b"c" * 20), 22) == [b"c" * 20]
    assert counts == {"frames cut": 2}


def test_a_connection_that_is_met_in_the_middle_of_a_message_is_found_its_way_into() -> None:
    counts: Counter[str] = Counter()
    connection = Messages(counts)

    assert connection.add(b"\xcd\x12\x34" * 10, 30) == []
    assert connection.add(frame(b"b" * 20), 22) == [b"b" * 20]
    assert counts == {"frames out of step": 1}


def test_after_a_loss_the_next_piece_begins_a_message() -> None:
    connection = Messages(Counter())
    long = frame(b"a" * 1000)

    connection.add(long[:500], 500)
    connection.lose()

    assert connection.add(frame(b"b" * 20), 22) == [b"b" * 20]


def test_a_huge_message_takes_no_more_memory_than_it_may() -> None:
    counts: Counter[str] = Counter()
    connection = Messages(counts)
    size = MAX_FRAME_BYTES + 10_000
    stream = b"\x02" + struct.pack(">Q", size) + bytes(size)

    found = [
        message
        for at in range(0, len(stream), 8192)
        for message in connection.add(stream[at : at + 8192], len(stream[at : at + 8192]))
    ]

    assert found == []
    assert counts == {"frames cut": 1}
    assert connection.add(frame(b"b" * 20), 22) == [b"b" * 20]


@given(st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 100)), max_size=10))
def test_any_pieces_are_taken(pieces: list[tuple[bytes, int]]) -> None:
    connection = Messages(Counter())

    for piece, beyond in pieces:
        connection.add(piece, len(piece) + beyond)
