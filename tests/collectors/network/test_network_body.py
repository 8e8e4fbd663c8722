import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.network.body import (
    AnswerScan,
    RequestScan,
    model_name,
    token_counts,
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 7}}, (5, 7, None)),
        (
            {
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 3},
                    "completion_tokens_details": {"reasoning_tokens": 2},
                }
            },
            (5, 7, 3),
        ),
        ({"tokens_evaluated": 5, "tokens_predicted": 7, "timings": {"cache_n": 3}}, (5, 7, 3)),
        ({"details": {"generated_tokens": 7, "input_length": 5}}, (5, 7, None)),
        ({"usage": None}, (None, None, None)),
        ({"prompt_tokens": -5, "completion_tokens": 1.5}, (None, None, None)),
        ({"text": '"prompt_tokens": 99'}, (None, None, None)),
    ],
)
def test_token_counts(text: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    for separators in ((",", ":"), (", ", ": ")):
        counts = token_counts(json.dumps(text, separators=separators).encode())
        assert tuple(counts.get(name) for name in names) == expected  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"model":"a/b"}', "a/b"),
        (b'{"model" : "a\\/b \\u00e9"}', "a/b é"),
        (b'{"model":""}', None),
        (b'{"model":null}', None),
        (b'{"model":"bad \\escape"}', None),
        (b'{"content":"say \\"model\\": \\"secret\\""}', None),
        (b'{"content":"my \\"model":"no key ends so"}', None),
        (b'{"model":"%b"}' % (b"x" * 300), None),
        (b'{"model":"first","metadata":{"model":"second"}}', "first"),
    ],
)
def test_model_name(text: bytes, expected: str | None) -> None:
    assert model_name(text) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        {
            "messages": [
                {"content": [{"type": "tool_use", "input": {"model": "said", "prompt": [1]}}]}
            ]
        },
        {"messages": [{"tool_calls": [{"function": {"arguments": {"model": "said"}}}]}]},
        {"response_format": {"json_schema": {"default": {"model": "said", "max_tokens": 9}}}},
        {"metadata": {"model": "said"}, "stop": ['\\"', "{", '"model":"said"']},
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_what_a_prompt_holds_is_no_setting_of_the_request(
    prompt: dict[str, Any], size: int
) -> None:
    padded = {"pad": "x" * 1000, **prompt, "options": {"num_predict": 5}, "model": "real"}
    data = json.dumps(padded).encode()
    request, answer = RequestScan(), AnswerScan()

    for at in range(0, len(data), size):
        request.feed(data[at : at + size])
        answer.feed(data[at : at + size])

    assert (request.model, request.max_tokens, request.prompt_tokens) == ("real", 5, None)
    assert answer.model == "real"


def test_a_form_names_no_model() -> None:
    scan = RequestScan()

    scan.feed(b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nsay "model": "said"')

    assert scan.model is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", None), ([5, 6, 7], 3), ([5], 1), ([], None), ([[1, 2], [3]], None), (["a"], None)],
)
def test_prompt_of_token_ids(prompt: Any, expected: int | None) -> None:
    scan = RequestScan()

    scan.feed(json.dumps({"prompt": prompt, "stop": [1, 2, 3, 4]}).encode())

    assert scan.prompt_tokens == expected


text_values = st.text(max_size=40) | st.sampled_from(['"model": "x"', '\\"model":"y"', "[1,2]"])
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(st.fixed_dictionaries({"content": text_values}), max_size=3),
        "model": st.text(min_size=1, max_size=20),
        "prompt": text_values | st.lists(st.integers(0, 150_000), max_size=300),
        "stream": st.booleans(),
    },
)


@given(bodies, st.lists(st.integers(0, 10_000), max_size=30), st.booleans())
def test_any_cut_of_a_request_reads_the_same(
    body: dict[str, Any], cuts: list[int], compact: bool
) -> None:
    data = json.dumps(body, separators=(",", ":") if compact else None).encode()
    scan = RequestScan()

    for piece in cut(data, cuts):
        scan.feed(piece)

    assert scan.model == body.get("model")
    ids = body.get("prompt")
    assert scan.prompt_tokens == (len(ids) if isinstance(ids, list) and ids else None)


@given(st.integers(0, 10**9), text_values, st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cut_of_an_answer_reads_the_same(count: int, text: str, cuts: list[int]) -> None:
    body = {"choices": [{"text": text}], "model": "m", "usage": {"prompt_tokens": count}}
    scan = AnswerScan()

    for piece in cut(json.dumps(body).encode(), cuts):
        scan.feed(piece)

    assert (scan.model, scan.counts) == ("m", {"prompt_tokens": count})


@given(st.lists(st.binary(max_size=100), max_size=10))
def test_garbage_never_raises(pieces: list[bytes]) -> None:
    request, answer = RequestScan(), AnswerScan()
    for piece in pieces:
        request.feed(piece)
        answer.feed(piece)
    assert len(request._carry) <= 1000
    assert len(answer._carry) <= 1000
