import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import DONE, ROLE, delta, event, usage

from latencyprism.collectors.network.endpoints import CHAT
from latencyprism.collectors.network.sse import EventSplitter, LineSplitter, is_done

CONTENT = {
    "chat": delta(content="Hi"),
    "chat with role": delta(role="assistant", content="Hi"),
    "reasoning": delta(content=None, reasoning_content="Hm"),
    "tool call": delta(tool_calls=[{"index": 0, "function": {"arguments": ""}}]),
    "completion": event({"choices": [{"index": 0, "text": " Hi", "finish_reason": None}]}),
    "token without text": event({"choices": [{"text": "", "token_ids": [42]}]}),
    "sglang": event({"text": "Hi there", "meta_info": {"completion_tokens": 2}}),
    "sglang ids": event({"output_ids": [5], "meta_info": {}}),
    "llama.cpp": event({"index": 0, "content": " Hi", "stop": False}),
    "tgi": b'data:{"index":1,"token":{"id":5,"text":" Hi","special":false}}\n\n',
    "spaces": b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n',
    "named": b'event: message\ndata: {"content":"Hi"}\n\n',
    "carriage returns": b'data: {"content":"Hi"}\r\n\r\n',
}
NO_CONTENT = {
    "role": ROLE,
    "role, null content": delta(role="assistant", content=None),
    "empty delta": delta(),
    "finish": event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}),
    "usage": usage(1, 2, 0),
    "done": DONE,
    "comment": b": ping\n\n",
    "error": event({"error": {"message": "out of memory", "type": "x"}}),
    "no tool calls": delta(content="", tool_calls=[]),
    "prompt ids": event({"choices": [{"delta": {"content": ""}}], "prompt_token_ids": [1, 2]}),
    "key inside text": event({"error": '"content":"Hi"'}),
    "empty": b"\n\n",
}


@pytest.mark.parametrize("data", CONTENT.values(), ids=CONTENT)
def test_content(data: bytes) -> None:
    assert CHAT.has_content(data)
    assert not is_done(data)


@pytest.mark.parametrize("data", NO_CONTENT.values(), ids=NO_CONTENT)
def test_not_content(data: bytes) -> None:
    assert not CHAT.has_content(data)
    assert is_done(data) == (data is DONE)


def test_done_without_a_space_and_after_a_name() -> None:
    assert is_done(b"data:[DONE]\n\n")
    assert is_done(b"event: end\ndata: [DONE]\r\n\r\n")
    assert not is_done(event("data: [DONE]"))


def test_split_and_coalesced_events() -> None:
    splitter = EventSplitter(1000)

    assert list(splitter.feed(b"data: a\n")) == []
    assert list(splitter.feed(b"\ndata: b\n\ndata: c")) == [b"data: a\n\n", b"data: b\n\n"]
    assert list(splitter.feed(b"\r\n\r")) == []
    assert list(splitter.feed(b"\ndata: d\n\n")) == [b"data: c\r\n\r\n", b"data: d\n\n"]


def test_a_large_event_is_cut_counted_and_followed_by_the_next() -> None:
    for size in (1, 7, 5000):
        splitter = EventSplitter(256)
        data = b"data: " + b"x" * 3000 + b"\n\ndata: y\n\n"
        events = [
            e for at in range(0, len(data), size) for e in splitter.feed(data[at : at + size])
        ]

        assert [len(e) <= 256 for e in events] == [True, True]
        assert events[1] == b"data: y\n\n"
        assert splitter.oversized == 1
        assert events[0] == b"data: " + b"x" * 186 + b"x" * 62 + b"\n\n"
        assert len(splitter._carry) <= 256


def test_what_a_hole_tore_is_not_given_out() -> None:
    splitter = EventSplitter(1000)
    splitter.feed(b"data: a")

    splitter.tear()

    assert not splitter.between
    assert list(splitter.feed(b"rest\n\ndata: b\n\n")) == [b"data: b\n\n"]
    assert splitter.between
    splitter.feed(b"data: c")
    splitter.restart()
    assert list(splitter.feed(b"data: d\n\n")) == [b"data: d\n\n"]


def test_lines_are_events_too() -> None:
    splitter = LineSplitter(1000)

    assert list(splitter.feed(b'{"a":1}\n')) == [b'{"a":1}\n']
    assert list(splitter.feed(b'{"b":')) == []
    assert list(splitter.feed(b'2}\r\n{"c":3}\n{')) == [b'{"b":2}\r\n', b'{"c":3}\n']


lines = st.sampled_from(["\n", "\r\n"])
values = st.recursive(st.none() | st.text(max_size=10), lambda v: st.lists(v, max_size=3))


@given(
    st.lists(st.tuples(st.sampled_from([*CONTENT.values(), *NO_CONTENT.values()]), lines)),
    st.lists(st.integers(0, 5000), max_size=40),
    st.integers(10, 80),
)
def test_any_cut_gives_the_same_events(
    events: list[tuple[bytes, str]], cuts: list[int], max_bytes: int
) -> None:
    data = b"".join(e.replace(b"\r", b"").replace(b"\n", end.encode()) for e, end in events)
    whole = EventSplitter(max_bytes)
    pieces = EventSplitter(max_bytes)
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]

    expected = list(whole.feed(data))
    got = [e for a, b in pairwise(edges) for e in pieces.feed(data[a:b])]

    assert got == expected
    assert pieces.oversized == whole.oversized
    assert len(expected) >= len(events)


@given(values)
def test_text_that_looks_like_json_is_no_content(value: Any) -> None:
    inside = json.dumps({"content": "x", "text": "y", "tool_calls": [{}], "v": value})
    assert not CHAT.has_content(event({"error": inside}))
