"""The few facts read out of JSON, by key, without parsing or keeping the text around them.

A key is looked for as it stands in JSON: its quotes are not escaped, so that text inside a string
(where every quote is escaped) is never taken for one. Of a whole body only keys near its root
count, since prompts hold JSON as well: what tools are called with, or schemas of answers. Elsewhere
nesting is not followed. The first value of a name counts, of token counts the last.
"""

import json
import re
from typing import Final, Literal, NamedTuple

MAX_NAME: Final = 256
"""Longest model name, in characters or escapes; a longer value is not taken."""

TokenField = Literal["prompt_tokens", "completion_tokens", "cached_tokens"]

_COUNTS: Final[dict[bytes, TokenField]] = {
    b"prompt_tokens": "prompt_tokens",  # OpenAI, SGLang
    b"input_tokens": "prompt_tokens",  # OpenAI Responses; of Anthropic the part not cached
    b"tokens_evaluated": "prompt_tokens",  # llama.cpp
    b"input_length": "prompt_tokens",  # TGI
    b"prompt_eval_count": "prompt_tokens",  # Ollama
    b"completion_tokens": "completion_tokens",
    b"output_tokens": "completion_tokens",
    b"tokens_predicted": "completion_tokens",
    b"generated_tokens": "completion_tokens",
    b"eval_count": "completion_tokens",
    b"cached_tokens": "cached_tokens",
    b"cache_n": "cached_tokens",
    b"cache_read_input_tokens": "cached_tokens",  # Anthropic
}
_BESIDE: Final = (b"cache_read_input_tokens", b"cache_creation_input_tokens")
"""Parts of the prompt that Anthropic's ``input_tokens`` leaves out."""
_NUMBER: Final = rb"\s{0,8}:\s{0,8}(\d{1,15})(?=[^\d.eE])"
# A quote that is not escaped; a pattern that begins with a look back would be slow to search for.
_COUNT = re.compile(
    rb'"(?<!\\")(' + b"|".join((*_COUNTS, *_BESIDE[1:])) + rb')"' + _NUMBER, re.ASCII
)
_MAX_TOKENS = re.compile(
    rb'"(?<!\\")(?:max_(?:completion_|output_|new_)?tokens|n_predict|num_predict)"' + _NUMBER,
    re.ASCII,
)
_MODEL = re.compile(
    rb'"model"(?<!\\"model")\s{0,8}:\s{0,8}"((?:[^"\\]|\\.){1,%d})"' % MAX_NAME, re.DOTALL
)
_TOKEN_LIST = re.compile(
    rb'"(?<!\\")(?:prompt|input_ids|prompt_token_ids)"\s{0,8}:\s{0,8}\[\s{0,8}\d'
)
_LONGEST = 2 * MAX_NAME + 64
"""No match of the patterns above is longer, so a carry of this size loses none."""
_OPTIONS: Final = 2
"""Depth of ``max_new_tokens`` in the parameters of TGI and SGLang, ``num_predict`` in Ollama's."""
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


def token_counts(text: bytes) -> dict[TokenField, int]:
    """Token counts that complete JSON text names, by the names of all known engines."""
    found = {name: int(number) for name, number in _COUNT.findall(text)}
    counts = {_COUNTS[name]: number for name, number in found.items() if name in _COUNTS}
    if b"input_tokens" in found:
        counts["prompt_tokens"] += sum(found.get(name, 0) for name in _BESIDE)
    return counts


def model_name(text: bytes) -> str | None:
    """First value of a key ``model``; None without one, or when it is empty or too long."""
    found = _MODEL.search(text)
    return None if found is None else _name(found)


def _name(found: re.Match[bytes]) -> str | None:
    try:
        return str(json.loads(b'"%b"' % found[1]))
    except ValueError:
        return None


class _Place(NamedTuple):
    """A place in JSON text: how many objects and lists are open there, and whether a string is."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    """Whether the next byte of the string is escaped."""

    def behind(self, text: bytes) -> "_Place":
        """The place behind this text, which begins here."""
        plain = text[self.escaped :]
        if b"\\" in plain:
            plain = _ESCAPE.sub(b"", plain)
        escaped = plain.endswith(b"\\") if text else self.escaped
        parts = plain.split(b'"')
        outside = b"".join(parts[self.quoted :: 2])
        opened = outside.count(b"{") + outside.count(b"[")
        closed = outside.count(b"}") + outside.count(b"]")
        quoted = self.quoted ^ (len(parts) % 2 == 0)
        return _Place(self.depth + opened - closed, quoted, escaped)

    def first(
        self, pattern: re.Pattern[bytes], text: bytes, deepest: int
    ) -> re.Match[bytes] | None:
        """First match in this text, which begins here, of a key inside at most so many objects and
        lists.
        """
        place, at = self, 0
        for found in pattern.finditer(text):
            place, at = place.behind(text[at : found.start()]), found.start()
            if 1 <= place.depth <= deepest and not place.quoted:
                return found
        return None


class RequestScan:
    """Reads the model, the most tokens asked for, and the length of a prompt of token ids out of a
    request body in pieces.

    Gives the same for any cut of the body; keeps no more than :data:`_LONGEST` bytes of it.
    """

    __slots__ = ("_carry", "_counting", "_place", "max_tokens", "model", "prompt_tokens")

    def __init__(self) -> None:
        self.model: str | None = None
        self.max_tokens: int | None = None
        """First limit named; None without one, and for a negative one, which means no limit."""
        self.prompt_tokens: int | None = None
        """Token ids of the prompt; None for a prompt of text, and until its list has ended."""
        self._carry = b""
        self._place = _Place()
        """Where the carry begins."""
        self._counting: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body."""
        text, place = self._carry + data, self._place
        if self.model is None and (named := place.first(_MODEL, text, 1)):
            self.model = _name(named)
        if self.max_tokens is None and (limit := place.first(_MAX_TOKENS, text, _OPTIONS)):
            self.max_tokens = int(limit[1])
        if self._counting is not None:
            self._count(data)
        elif self.prompt_tokens is None and (found := place.first(_TOKEN_LIST, text, 1)):
            self._counting = 1
            self._count(text[found.end() :])
        self._carry = text[-_LONGEST:]
        self._place = place.behind(text[:-_LONGEST])

    def _count(self, text: bytes) -> None:
        assert self._counting is not None
        end = text.find(b"]")
        self._counting += text.count(b",", 0, len(text) if end < 0 else end)
        if end >= 0:
            self.prompt_tokens, self._counting = self._counting, None


class AnswerScan:
    """Reads the model and token counts out of an answer that is no event stream, in pieces.

    Gives the same for any cut of the body; keeps no more than :data:`_LONGEST` bytes of it.
    """

    __slots__ = ("_carry", "_place", "counts", "model")

    def __init__(self) -> None:
        self.model: str | None = None
        self.counts: dict[TokenField, int] = {}
        self._carry = b""
        self._place = _Place()
        """Where the carry begins."""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body."""
        text, place = self._carry + data, self._place
        if self.model is None and (named := place.first(_MODEL, text, 1)):
            self.model = _name(named)
        self.counts.update(token_counts(text))
        self._carry = text[-_LONGEST:]
        self._place = place.behind(text[:-_LONGEST])
