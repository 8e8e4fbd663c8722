"""Which protocol a connection speaks, told from its first bytes.

The tap keeps connections and puts their segments in order; what the bytes mean is up to a
:class:`~latencyprism.collectors.network.conversation.Conversation`. It calls
:func:`open_conversation`

- with ``whole=True`` for the first bytes of a connection whose handshake was seen, whichever side
  sends them. The answer must be a conversation or a refusal: these bytes do not come again.
- with ``whole=False`` for a segment of a connection that nobody follows: it was open before the
  capture began, or track of it was lost. A segment of either side is offered, the client's reading
  first (where both ends are watched), until one is taken; that segment is given to the conversation
  first. The other side is given from the first segment on that ``Conversation.joins`` takes.

A further protocol is a module of its own with a class that has the shape of ``Conversation``, and
a prefix here.
"""

from typing import Final

from latencyprism.collectors.network.conversation import Conversation, Link, RefusedError
from latencyprism.collectors.network.http import Http1, starts_request

HEAD_BYTES: Final = 64
"""What is looked at of a segment, at most."""

_TLS: Final = b"\x16\x03"
_HTTP2: Final = b"PRI * HTTP/2"


def open_conversation(
    link: Link, head: bytes, *, from_client: bool, whole: bool
) -> Conversation | None:
    """The conversation that a segment begins, or can be joined at; None when it tells nothing.

    ``head`` is the start of the segment, up to :data:`HEAD_BYTES`; ``whole`` says that it is the
    first of its connection. Raises :class:`RefusedError`, once a connection, for a protocol that is
    not followed. Cheap: it is asked for every segment of connections that nobody follows.
    """
    if whole and head.startswith(_TLS):
        raise RefusedError("TLS connections")
    if whole and head.startswith(_HTTP2):
        raise RefusedError("HTTP/2 connections")
    if whole or (from_client and starts_request(head)):
        return Http1(link)
    return None
