import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from network_wire import (
    DONE,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    answer,
    chunk,
    event,
    make_tap,
    play,
    request,
)

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.endpoints import dialect_of
from latencyprism.collectors.network.pcap import AnyServer, replay
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

DATA = Path(__file__).with_name("data")
LINES_HEAD = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/x-ndjson")


def line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def named(value: dict[str, Any]) -> bytes:
    return b"event: %b\n%b" % (str(value["type"]).encode(), event(value))


RESPONSES = [
    named({"type": "response.created", "response": {"model": "m", "output": [], "usage": None}}),
    named({"type": "response.output_item.added", "item": {"content": [], "role": "assistant"}}),
    named({"type": "response.reasoning_text.delta", "delta": "ANSWER thinks"}),
    named({"type": "response.output_text.delta", "delta": "ANSWER"}),
    named({"type": "response.function_call_arguments.delta", "delta": '{"a'}),
    named({"type": "response.output_text.delta", "delta": ""}),
    named({"type": "response.output_text.done", "text": "ANSWER"}),
    named({"type": "response.content_part.done", "part": {"text": "ANSWER"}}),
    named(
        {
            "type": "response.completed",
            "response": {
                "output": [{"content": [{"text": "ANSWER"}]}],
                "usage": {
                    "input_tokens": 9,
                    "input_tokens_details": {"cached_tokens": 4},
                    "output_tokens": 3,
                    "output_tokens_details": {"reasoning_tokens": 1},
                },
            },
        }
    ),
]
MESSAGES = [
    named(
        {
            "type": "message_start",
            "message": {
                "model": "m",
                "content": [],
                "usage": {
                    "input_tokens": 2,
                    "cache_read_input_tokens": 4,
                    "cache_creation_input_tokens": 3,
                    "output_tokens": 1,
                },
            },
        }
    ),
    named({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}),
    named({"type": "ping"}),
    named({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "A"}}),
    named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ANSWER"}}),
    named(
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}
    ),
    named({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}),
    named({"type": "message_delta", "delta": {"stop_reason": "x"}, "usage": {"output_tokens": 3}}),
    named({"type": "message_stop"}),
]
OLLAMA_CHAT = [
    line({"model": "m", "message": {"role": "assistant", "content": "ANSWER"}, "done": False}),
    line({"model": "m", "message": {"content": "", "thinking": "ANSWER"}, "done": False}),
    line({"model": "m", "message": {"content": "", "tool_calls": [{"function": {}}]}}),
    line(
        {
            "model": "m",
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "prompt_eval_count": 9,
            "eval_count": 3,
            "eval_duration": 5,
        }
    ),
]
OLLAMA_GENERATE = [
    *(line({"model": "m", "response": text, "done": False}) for text in ("AN", "SW", "ER")),
    line({"response": "", "done": True, "context": [1], "prompt_eval_count": 9, "eval_count": 3}),
]
TGI = [
    *(
        event({"index": n, "token": {"id": n, "text": text, "special": False}})
        for n, text in enumerate(["A", ""])
    ),
    event(
        {
            "token": {"id": 7, "text": "B"},
            "generated_text": "AB",
            "details": {"generated_tokens": 3, "input_length": 9},
        }
    ),
]
SGLANG = [
    event({"text": "A" * n, "meta_info": {"prompt_tokens": 9, "completion_tokens": n}})
    for n in (1, 2, 3)
] + [DONE]


@pytest.mark.parametrize(
    ("path", "head", "pieces", "cached"),
    [
        ("/v1/responses", STREAM_HEAD, RESPONSES, 4),
        ("/v1/messages", STREAM_HEAD, MESSAGES, 4),
        ("/api/chat", LINES_HEAD, OLLAMA_CHAT, None),
        ("/api/generate", LINES_HEAD, OLLAMA_GENERATE, None),
        ("/generate_stream", STREAM_HEAD, TGI, None),
        ("/generate", STREAM_HEAD, SGLANG, None),
    ],
)
def test_streams(path: str, head: bytes, pieces: list[bytes], cached: int | None) -> None:
    wire = Wire()
    body = {"model": "m", "prompt": "PROMPT", "stream": True}
    packets = [
        *wire.syn(),
        wire.client(request(body, path=path)),
        wire.server(head),
        *(wire.server(chunk(piece)) for piece in pieces),
        wire.server(STREAM_END),
    ]

    (part,) = play(make_tap(), packets)

    assert (part.state, part.streaming, part.model) == ("complete", True, "m")
    assert (part.prompt_tokens, part.cached_tokens, part.completion_tokens) == (9, cached, 3)
    assert 1 + len(part.chunk_deltas_us) == 3
    pack = Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=[part])
    data = Codec().encode(TELEMETRY_REQUESTS, pack)
    assert b"PROMPT" not in data
    assert b"ANSWER" not in data


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"max_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_completion_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": None}, None),
        ("/v1/chat/completions", {"messages": ['"max_tokens":5']}, None),
        ("/v1/responses", {"max_output_tokens": 5}, 5),
        ("/completion", {"n_predict": 5}, 5),
        ("/completion", {"n_predict": -1}, None),
        ("/generate", {"parameters": {"max_new_tokens": 5}}, 5),
        ("/generate", {"sampling_params": {"max_new_tokens": 5}}, 5),
        ("/api/chat", {"options": {"num_predict": 5}}, 5),
    ],
)
def test_method_and_limit(path: str, body: dict[str, Any], expected: int | None) -> None:
    wire = Wire()

    (part,) = play(make_tap(), [*wire.syn(), wire.client(request(body, path=path))])

    assert (part.method, part.max_tokens) == ("POST", expected)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/models", "/tokenize", "/messages/count"])
def test_other_paths_are_no_endpoints(path: str) -> None:
    assert dialect_of(path) is None


def test_every_path_is_reported_when_asked_for() -> None:
    wire, tap = Wire(), Tap(AnyServer(), NetworkConfig(), every_path=True)
    packets = [
        *wire.syn(),
        wire.client(request(path="/metrics", method="GET") + request({}, path="/v1/embeddings")),
        wire.server(answer(b"ok") + answer(b"{}", status="404 Not Found")),
    ]

    parts = play(tap, packets)

    assert [(p.method, p.endpoint, p.status) for p in parts] == [
        ("GET", "/metrics", 200),
        ("POST", "/v1/embeddings", 404),
    ]


def recorded(path: Path) -> list[RequestTiming]:
    """The last part of each exchange of a file, by arrival, with all of its content events."""
    parts = replay(path, Tap(AnyServer(), NetworkConfig()), interval_ms=60_000)
    return sorted(parts, key=lambda part: part.arrival_ns)


def told(part: RequestTiming) -> tuple[object, ...]:
    chunks = len(part.chunk_deltas_us) + (part.chunk_base_ns is not None)
    return part.endpoint, part.streaming, chunks, part.prompt_tokens, part.completion_tokens


def test_what_vllm_sends() -> None:
    parts = recorded(DATA / "vllm_endpoints.pcap")

    assert [told(part) for part in parts if part.status == 200] == [
        ("/v1/chat/completions", True, 8, 26, 8),
        ("/v1/completions", True, 8, 23, 8),
        ("/v1/responses", True, 8, 26, 8),
        ("/v1/messages", True, 8, 26, 8),
        ("/v1/responses", False, 0, 26, 8),
        ("/v1/messages", False, 0, 26, 8),
    ]
    assert [part.status for part in parts if part.status != 200] == [403, 400]
    assert {(part.model, part.max_tokens) for part in parts[:6]} == {("small", 8)}
    assert all(b"sky" not in repr(part).encode() for part in parts)


def test_what_llama_cpp_sends() -> None:
    parts = recorded(DATA / "llamacpp_endpoints.pcapng")

    assert [told(part) for part in parts if part.status == 200] == [
        ("/v1/chat/completions", True, 7, 26, 8),  # two tokens share an event
        ("/v1/completions", True, 8, 23, 8),
        ("/completion", True, 8, 23, 8),
        ("/completion", True, 8, 23, 8),
        ("/v1/responses", True, 8, 26, 8),
        ("/v1/messages", True, 7, 26, 8),
        ("/v1/messages", False, 0, 26, 8),
        ("/completion", False, 0, 23, 8),
        ("/v1/responses", False, 0, 26, 8),
    ]
    assert {part.max_tokens for part in parts if part.status == 200} == {8}


def test_a_whole_answer_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(gzip.decompress((DATA / "openai_stream.pcap.gz").read_bytes()))

    (part,) = recorded(path)

    assert told(part) == ("/v1/chat/completions", True, 512, None, None)
    assert (part.state, part.max_tokens, part.estimated) == ("complete", 512, ())
