"""What a sender is answered, as protobuf or JSON: an ``ExportTraceServiceResponse`` or a
``google.rpc.Status``.
"""

import json
from collections import Counter

from latencyprism.collectors.otlp.receiver import Encoding, explained
from latencyprism.collectors.otlp.wire import encoded

INVALID_ARGUMENT = 3


def accepted(refused: Counter[str], encoding: Encoding) -> bytes:
    """The answer to a message of which these spans were refused."""
    count = refused.total()
    if encoding == "json":
        partial = {"rejectedSpans": str(count), "errorMessage": explained(refused)}
        return json.dumps({"partialSuccess": partial} if count else {}).encode()
    if not count:
        return b""
    return encoded(1, encoded(1, count) + encoded(2, explained(refused).encode()))


def status(message: str, encoding: Encoding) -> bytes:
    """The answer to what is no message."""
    if encoding == "json":
        return json.dumps({"code": INVALID_ARGUMENT, "message": message}).encode()
    return encoded(1, INVALID_ARGUMENT) + encoded(2, message.encode())
