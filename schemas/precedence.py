"""Whose account of a request counts where several sources tell of it."""

from typing import Final

REQUEST_SOURCES: Final = ("network", "gateway", "otlp")
"""Sources of requests, best first: the network sees every chunk when it comes, a gateway's log the
whole exchange when it is over, spans what the engine says of it some seconds later."""


def precedence(source: str) -> int:
    """Place of a source in that order, 0 the best; of one that stands in for it, 0 too."""
    return REQUEST_SOURCES.index(source) if source in REQUEST_SOURCES else 0
