"""Messages that cannot be taken, and why. Pure but for the clock of the letter."""

import time
from typing import Any, Final

from latencyprism.schemas.codec import DecodeError, Pack
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import Topic

COMPONENT: Final = "streams"
PAYLOAD_BYTES: Final = 900_000
"""Most of a refused message that its letter keeps."""
KEY_BYTES: Final = 50_000
"""Most of its key; a whole letter fits Kafka's default limit of a message."""
DETAIL_CHARS: Final = 2_000
NAME_CHARS: Final = 1_000
"""Longest instance, service or agent; windows repeat the names."""


def dead_letter(
    error: DecodeError,
    *,
    topic: str,
    partition: int,
    offset: int,
    key: bytes | None,
    payload: bytes | None,
) -> DeadLetter:
    """The letter about a message that was refused."""
    return DeadLetter(
        topic=topic,
        partition=partition,
        offset=offset,
        at_ns=time.time_ns(),
        component=COMPONENT,
        reason=error.reason,
        detail=str(error)[:DETAIL_CHARS],
        key=key if key is None else key[:KEY_BYTES],
        payload=(payload or b"")[:PAYLOAD_BYTES],
    )


def key_of(topic: Topic, key: bytes | None, pack: Pack[Any]) -> str:
    """The key that a pack came under.

    Raises DecodeError when it is no text or too long, or when a sample belongs under another one.
    """
    try:
        text = (key or b"").decode()
    except UnicodeDecodeError as e:
        raise DecodeError("invalid_value", f"the key is no text: {e}") from e
    if not text:
        raise DecodeError("invalid_value", f"without a key, want the {topic.key}")
    if len(text) > NAME_CHARS:
        raise DecodeError(
            "invalid_value", f"a key of {len(text)} characters, at most {NAME_CHARS} are taken"
        )
    if len(pack.agent) > NAME_CHARS:
        raise DecodeError(
            "invalid_value",
            f"an agent's id of {len(pack.agent)} characters, at most {NAME_CHARS} are taken",
        )
    for sample in pack.samples:
        told = getattr(sample, topic.key)
        if told != text:
            raise DecodeError("invalid_value", f"a sample of {told} under the key {text}")
    return text
