"""Speaks as vLLM 0.32's processes speak to each other, for tests."""

import struct
from collections.abc import Iterable, Mapping

NIL = b"\xc0"


def text(value: str) -> bytes:
    data = value.encode()
    return bytes((0xD9, len(data))) + data if len(data) > 31 else bytes((0xA0 | len(data),)) + data


def integer(value: int) -> bytes:
    return bytes((value,)) if value < 128 else b"\xce" + struct.pack(">I", value)


def number(value: float) -> bytes:
    return b"\xcb" + struct.pack(">d", value)


def array(items: Iterable[bytes]) -> bytes:
    parts = list(items)
    head = (
        bytes((0x90 | len(parts),)) if len(parts) < 16 else b"\xdc" + struct.pack(">H", len(parts))
    )
    return head + b"".join(parts)


def mapping(pairs: Mapping[str, bytes]) -> bytes:
    head = (
        bytes((0x80 | len(pairs),)) if len(pairs) < 16 else b"\xde" + struct.pack(">H", len(pairs))
    )
    return head + b"".join(text(key) + value for key, value in pairs.items())


def frame(body: bytes, *, more: bool = False) -> bytes:
    if len(body) < 256:
        return bytes((int(more), len(body))) + body
    return bytes((2 | int(more),)) + struct.pack(">Q", len(body)) + body


class Engine:
    """Makes the messages of one engine core; ``now_ns`` is its monotonic clock."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.running: set[str] = set()

    def add(self, request: str, *, prompt: int) -> bytes:
        """What it receives for a new request."""
        tokens = array(integer(token % 3000) for token in range(prompt))
        body = array([text(request), tokens, *[NIL] * 20])
        self.running.add(request)
        return frame(b"\x00", more=True) + frame(body)

    def abort(self, *requests: str) -> bytes:
        self.running -= set(requests)
        return frame(b"\x01", more=True) + frame(array(text(request) for request in requests))

    def step(
        self,
        tokens: Mapping[str, int],
        *,
        joined: Mapping[str, int] | None = None,
        cached: int = 0,
        finished: Iterable[str] = (),
        waited_ns: int = 0,
        took_ns: int = 1_000_000,
        active: int | None = None,
        stats: bool = True,
    ) -> bytes:
        """What it sends after a step that gave so many tokens to each request."""
        joined = joined or {}
        done = set(finished)
        self.running = (self.running | tokens.keys()) - done
        outputs = []
        for request, count in tokens.items():
            fields = [NIL] * 18
            fields[0], fields[1] = text(request), array(integer(7) for _ in range(count))
            fields[13] = integer(0)
            if request in done:
                fields[5] = integer(1)
            if request in joined:
                scheduled_ns = self.now_ns - took_ns
                fields[7] = array(
                    mapping({"type": integer(kind), "timestamp": number(at / 1e9)})
                    for kind, at in ((1, scheduled_ns - waited_ns), (2, scheduled_ns))
                )
                prompt = joined[request]
                fields[11] = mapping(
                    {
                        "num_prompt_tokens": integer(prompt),
                        "num_computed_tokens": integer(prompt - cached),
                        "num_cached_tokens": integer(cached),
                    }
                )
            outputs.append(array(fields))
        told = mapping(
            {
                "num_running_reqs": integer(len(self.running) if active is None else active),
                "num_waiting_reqs": integer(0),
                "num_skipped_waiting_reqs": integer(0),
                "kv_cache_usage": number(0.5),
                "waiting_lora_adapters": mapping({}),
            }
        )
        return frame(
            array(
                [
                    integer(0),
                    array(outputs),
                    told if stats else NIL,
                    number(self.now_ns / 1e9),
                    *[NIL] * 4,
                    text("default"),
                ]
            )
        )
