"""The OpenAI API as vLLM spells it: what a request asks for, and its answers."""

import json
import time
from typing import Any, Literal

from latencyprism.simulator.engine import Request, Served

Endpoint = Literal["chat.completions", "completions"]
DEFAULT_MAX_TOKENS = 16


class BadRequestError(ValueError):
    """A request the server refuses; the text is for the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def generation(
    body: dict[str, Any],
    endpoint: Endpoint,
    *,
    model: str,
    request_id: str,
    arrival_ns: int,
    block_tokens: int,
) -> Request:
    """What the body of a request asks of the engine. Raises :class:`BadRequestError`.

    Token ids are counted as they are, text by its words.
    """
    if body.get("model", model) != model:
        raise BadRequestError(f"the model {body['model']!r} does not exist", 404)
    tokens = _prompt(body, endpoint)
    return Request(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=len(tokens),
        output_tokens=_max_tokens(body),
        blocks=_blocks(tokens, block_tokens),
    )


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises :class:`BadRequestError`."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequestError("the body is no JSON object")
    return value


_PREFIX: dict[Endpoint, str] = {"completions": "cmpl", "chat.completions": "chatcmpl"}


class Answer:
    """Spells the answers to one request as vLLM does."""

    def __init__(self, endpoint: Endpoint, request_id: str, model: str) -> None:
        self._chat = endpoint == "chat.completions"
        self._head = {
            "id": f"{_PREFIX[endpoint]}-{request_id}",
            "object": ("chat.completion" if self._chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
        }
        streamed = dict(self._head)
        if self._chat:
            streamed["object"] = "chat.completion.chunk"
        self._stream_head = json.dumps(streamed, separators=(",", ":"))[:-1].encode()

    @property
    def opening(self) -> bytes | None:
        """The chunk without content before the first token; None where there is none."""
        if not self._chat:
            return None
        return self._event(b'"delta":{"role":"assistant","content":""}', b"null")

    def chunk(self, index: int, *, last: bool) -> bytes:
        """The event of one token."""
        text = b'" t%d"' % (index % 1000)
        content = b'"delta":{"content":%s}' % text if self._chat else b'"text":%s' % text
        return self._event(content, b'"length"' if last else b"null")

    def usage(self, request: Request, served: Served) -> bytes:
        """The event that follows the last token."""
        usage = json.dumps(_usage(request, served), separators=(",", ":")).encode()
        return b'data: %s,"choices":[],"usage":%s}\n\n' % (self._stream_head, usage)

    def whole(self, request: Request, served: Served) -> dict[str, Any]:
        """The answer in one piece."""
        text = "".join(f" t{index % 1000}" for index in range(request.output_tokens))
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return {**self._head, "choices": [choice], "usage": _usage(request, served)}

    def _event(self, content: bytes, finish: bytes) -> bytes:
        return b'data: %s,"choices":[{"index":0,%s,"logprobs":null,"finish_reason":%s}]}\n\n' % (
            self._stream_head,
            content,
            finish,
        )


def _usage(request: Request, served: Served) -> dict[str, Any]:
    return {
        "prompt_tokens": request.prompt_tokens,
        "total_tokens": request.prompt_tokens + request.output_tokens,
        "completion_tokens": request.output_tokens,
        "prompt_tokens_details": {"cached_tokens": served.cached_tokens},
    }


def _max_tokens(body: dict[str, Any]) -> int:
    if body.get("n", 1) != 1:
        raise BadRequestError("n must be 1")
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequestError(f"{key} must be a whole number from 1 up, not {value!r}")
            return value
    return DEFAULT_MAX_TOKENS


def _prompt(body: dict[str, Any], endpoint: Endpoint) -> list[Any]:
    if endpoint == "completions":
        prompt = body.get("prompt")
    else:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequestError("messages must be a list of objects")
        prompt = " ".join(str(message.get("content") or "") for message in messages)
    if isinstance(prompt, str):
        return prompt.split()
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    raise BadRequestError("prompt must be a text or a list of token ids")


def _blocks(tokens: list[Any], block_tokens: int) -> tuple[int, ...]:
    """Hashes of the whole blocks of a prompt, each covering all before it."""
    block, blocks = 0, []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = hash((block, *tokens[end - block_tokens : end]))
        blocks.append(block)
    return tuple(blocks)
