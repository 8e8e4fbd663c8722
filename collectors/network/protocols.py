"""Which protocol a connection speaks, told from its first bytes.

The tap keeps connections and puts their segments in order; what the bytes mean is up to a
:class:`~latencyprism.collectors.network.conversation.Conversation`. It calls
:func:`open_conversation`

- with ``whole=True`` for the first bytes of a connection whose handshake was seen, whichever side
  sends them. The answer must be a conversation: these bytes do not come again.
- with ``whole=False`` for a segment of a connection that nobody follows: it was open before the
  capture began, or track of it was lost. A segment of either side is offered, the client's reading
  first (where both ends are watched), until one is taken; that segment is given to the conversation
  first. The other side is given from the first segment on that ``Conversation.joins`` takes.

A further protocol is a module of its own with a class that has the shape of ``Conversation``, and
a prefix here.
"""

from typing import Final

from latencyprism.collectors.network.conversation import Conversation, Link
from latencyprism.collectors.network.http import Http1, starts_request
from latencyprism.collectors.network.http2 import Http2
from latencyprism.collectors.network.http2_frames import (
    PREFACE,
    starts_request_frame,
    starts_settings,
)
from latencyprism.collectors.network.tls import Tls
from latencyprism.collectors.network.tls_records import starts_record

HEAD_BYTES: Final = 64
"""What is looked at of a segment, at most."""

_TLS: Final = b"\x16\x03"
_HTTP2: Final = PREFACE[:3]
"""Enough of it: no method of HTTP/1.1 begins like this."""


def open_conversation(
    link: Link, head: bytes, *, from_client: bool, whole: bool
) -> Conversation | None:
    """The conversation that a segment begins, or can be joined at; None when it tells nothing.

    ``head`` is the start of the segment, up to :data:`HEAD_BYTES`; ``whole`` says that it is the
    first of its connection. Cheap: it is asked for every segment of connections that nobody
    follows.
    """
    if whole and head.startswith(_TLS):
        return Tls(link, whole=True)
    if not whole and from_client and starts_record(head):
        return Tls(link, whole=False)
    if from_client and head.startswith(_HTTP2 if whole else PREFACE):
        return Http2(link, client_whole=True, server_whole=whole)
    if whole and not from_client and starts_settings(head):
        return Http2(link, client_whole=True, server_whole=True)
    if not whole and from_client and starts_request_frame(head):
        return Http2(link, client_whole=False, server_whole=False)
    if whole or (from_client and starts_request(head)):
        return Http1(link)
    return None
