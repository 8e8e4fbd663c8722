"""Messages off the wire: the first byte chooses the topic, the rest is its body."""

from latencyprism.schemas import avro
from latencyprism.schemas.codec import SINGLE_OBJECT, Codec, DecodeError
from latencyprism.schemas.topics import TOPICS

CODEC = Codec()
HEADS = [SINGLE_OBJECT + avro.schema_fingerprint(avro.message_schema(topic)) for topic in TOPICS]


def target_message_body(data: bytes) -> None:
    """A message with the right head and any body."""
    chosen = (data[0] if data else 0) % len(TOPICS)
    try:
        CODEC.decode(TOPICS[chosen], HEADS[chosen] + data[1:])
    except DecodeError:
        return


def target_message(data: bytes) -> None:
    """Any bytes as a message."""
    try:
        CODEC.decode(TOPICS[0], data)
    except DecodeError:
        return
