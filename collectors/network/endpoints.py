"""The paths that are answered with tokens, and how each shows generated output in its events.

A key is looked for as it stands in JSON: inside a string its quotes are escaped. Bytes are looked
for with ``find``: ``in`` first tries to take its left side for a number, and the exception that
this costs takes longer than the search.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an endpoint writes generated output: text, reasoning, tool calls or token ids."""

    usual: bytes
    """What stands before the text of nearly every content event, up to its opening quote."""
    content: re.Pattern[bytes]
    """What any content event holds."""

    def has_content(self, event: bytes) -> bool:
        """Whether the event carries generated output.

        Not content: the chunk that only names the role, an empty delta, a summary of what was sent
        before, usage, ``[DONE]``, and errors.
        """
        at = event.find(self.usual)
        text = at + len(self.usual)
        if at >= 0 and event[text : text + 1] != b'"':
            return True
        return self.content.search(event) is not None


def _dialect(usual: str, *others: str, more: bytes = b"") -> Dialect:
    """Content is a text under one of the keys that is not empty, or matches ``more``."""
    keys = "|".join((usual, *others)).encode()
    texts = rb'"(?:' + keys + rb')"\s*:\s*"[^"]'
    return Dialect(
        usual=f'"{usual}":"'.encode(), content=re.compile(texts + (more and b"|" + more))
    )


_TOOLS: Final = rb'"tool_calls"\s*:\s*\[\s*\{'
_TOKENS: Final = rb'"(?:output_ids|token_ids|tokens)"\s*:\s*\[\s*\d'
_TOKEN: Final = rb'"token"\s*:\s*\{\s*"id"\s*:\s*\d'
_CHAT: Final = ("reasoning_content", "reasoning", "arguments", "text")

CHAT: Final = _dialect("content", *_CHAT, more=_TOOLS + b"|" + _TOKENS)
"""Also that of paths that nobody knows."""
_TEXT: Final = _dialect("text", "text_output", more=_TOKENS + b"|" + _TOKEN)
_COMPLETION: Final = _dialect("content", more=_TOKENS)
_RESPONSES: Final = _dialect("delta")
_MESSAGES: Final = _dialect("text", "thinking", "partial_json")
_OLLAMA_CHAT: Final = _dialect("content", "thinking", more=_TOOLS)
_OLLAMA_GENERATE: Final = _dialect("response", "thinking")

ENDPOINTS: Final[Mapping[str, Dialect]] = {
    "/chat/completions": CHAT,  # OpenAI
    "/completions": _TEXT,
    "/responses": _RESPONSES,
    "/messages": _MESSAGES,  # Anthropic
    "/completion": _COMPLETION,  # llama.cpp
    "/generate_stream": _TEXT,  # TGI, Triton
    "/api/chat": _OLLAMA_CHAT,
    "/api/generate": _OLLAMA_GENERATE,
    "/generate": _TEXT,  # SGLang, TGI
}
"""Ends of paths; the first that fits counts."""


def dialect_of(path: str) -> Dialect | None:
    """What the endpoint at a path (without query) speaks; None for all other paths."""
    return next((dialect for end, dialect in ENDPOINTS.items() if path.endswith(end)), None)
