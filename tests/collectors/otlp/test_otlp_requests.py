"""Spans of each engine, under one set of names."""

import math
from typing import Any

import pytest
from otlp_messages import SPAN, START_NS, TRACE, VLLM

from latencyprism.collectors.otlp.requests import is_possible, is_request, timing
from latencyprism.collectors.otlp.spans import Span
from latencyprism.schemas.records import RequestTiming

INSTANCE = "127.0.0.1:8000"


def told(attributes: Any, **changes: Any) -> Span:
    fields: dict[str, Any] = {
        "name": "llm_request",
        "trace_id": TRACE,
        "span_id": SPAN,
        "kind": 2,
        "start_ns": START_NS,
        "end_ns": START_NS + 841_682_801,
        "failed": False,
        "attributes": attributes,
    }
    return Span(**(fields | changes))


def test_every_field_of_vllm() -> None:
    span = told({**VLLM, "gen_ai.response.model": "small"})

    assert (is_request(span), is_possible(span)) == (True, True)
    request = timing(span, INSTANCE)
    assert request == RequestTiming(
        request_id=request.request_id,
        part=0,
        state="complete",
        instance=INSTANCE,
        source="otlp",
        observed_at_ns=START_NS + 841_083_000,
        endpoint="llm_request",
        model="small",
        arrival_ns=START_NS,
        first_token_ns=START_NS + 618_466_000,
        end_ns=START_NS + 841_083_000,
        chunks_before=0,
        prompt_tokens=540,
        completion_tokens=20,
        trace_id=TRACE,
        max_tokens=20,
        queue_us=19,
        prefill_us=401_417,
        decode_us=222_811,
    )


def test_vllm_before_its_engine_v1_told_less() -> None:
    span = told(
        {
            "gen_ai.response.model": "m",
            "gen_ai.latency.time_in_queue": 0.01,
            "gen_ai.latency.time_to_first_token": 0.2,
            "gen_ai.latency.e2e": 0.8,
            "gen_ai.latency.time_in_scheduler": 0.001,
            "gen_ai.latency.time_in_model_forward": 300.0,
        }
    )

    request = timing(span, INSTANCE)
    assert is_request(span)
    assert (request.queue_us, request.prefill_us, request.decode_us) == (10_000, None, None)


def test_sglang() -> None:
    span = told(
        {
            "gen_ai.usage.completion_tokens": 5,
            "gen_ai.usage.prompt_tokens": 40,
            "gen_ai.usage.cached_tokens": 32,
            "gen_ai.response.model": "m",
            "gen_ai.latency.time_to_first_token": 0.1,
            "gen_ai.latency.e2e": 0.3,
            "gen_ai.latency.time_in_model_decode": 0.2,
            "gen_ai.latency.time_in_model_inference": 0.29,
            "gen_ai.latency.time_in_model_prefill": 0.09,
        },
        name="Req 1f3a",
        kind=1,
    )

    request = timing(span, INSTANCE)
    assert is_request(span)
    assert (request.prompt_tokens, request.cached_tokens, request.queue_us) == (40, 32, None)
    assert (request.prefill_us, request.decode_us) == (90_000, 200_000)


def test_tgi_writes_times_as_rust_prints_them() -> None:
    span = told(
        {
            "total_time": "1.234567891s",
            "queue_time": "450.5µs",
            "inference_time": "1.2s",
            "http.route": "/generate_stream",
            "http.request.method": "POST",
            "http.response.status_code": 200,
        },
        name="generate_stream",
        kind=1,
    )

    request = timing(span, INSTANCE)
    assert is_request(span)
    assert (request.endpoint, request.method, request.status) == ("/generate_stream", "POST", 200)
    assert request.end_ns == START_NS + 1_234_567_891
    assert request.queue_us == 450
    assert (request.first_token_ns, request.decode_us) == (None, None)


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("2s", None),
        ("0.5s", 500_000),
        ("12.345678ms", 12_346),
        ("789ns", 1),
        ("7us", 7),
        ("soon", None),
        ("-1ms", None),
        ("1.5", None),
        ("9" * 13 + "s", None),
    ],
)
def test_durations(text: str, us: int | None) -> None:
    span = told({"gen_ai.latency.e2e": 1.0, "queue_time": text})

    assert timing(span, INSTANCE).queue_us == us


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"gen_ai.usage.prompt_tokens": 5},  # of a client that counts tokens
        {"gen_ai.latency.e2e": 1.0},
        {"queue_time": "1ms"},
    ],
)
def test_other_spans_are_none_of_ours(attributes: Any) -> None:
    assert not is_request(told(attributes))


def test_a_callers_span_is_not_the_engines() -> None:
    assert not is_request(told(VLLM, kind=3))


@pytest.mark.parametrize(
    "changes",
    [{"start_ns": 0}, {"end_ns": START_NS - 1}, {"start_ns": 1 << 62, "end_ns": 1 << 63}],
)
def test_impossible_times(changes: dict[str, int]) -> None:
    assert not is_possible(told(VLLM, **changes))


@pytest.mark.parametrize("value", [-0.1, 0.9, math.nan, math.inf, 1e300, -5, 1 << 62])
def test_a_stage_that_cannot_be_counts_as_not_told(value: float) -> None:
    request = timing(told({**VLLM, "gen_ai.latency.time_in_model_prefill": value}), INSTANCE)

    assert (request.prefill_us, request.decode_us) == (None, 222_811)


def test_a_request_that_ended_before_its_first_token_has_none() -> None:
    aborted = {
        **VLLM,
        "gen_ai.latency.time_to_first_token": 0.0,
        "gen_ai.latency.time_in_model_prefill": -15_331.2,
        "gen_ai.latency.time_in_model_decode": 0.0,
        "gen_ai.usage.completion_tokens": 0,
    }

    request = timing(told(aborted, failed=True), INSTANCE)
    assert (request.state, request.first_token_ns, request.prefill_us) == ("aborted", None, None)


@pytest.mark.parametrize("value", [-1, 1 << 40, 1.5, "540", math.nan])
def test_counts_that_cannot_be_count_as_not_told(value: Any) -> None:
    request = timing(told({**VLLM, "gen_ai.usage.prompt_tokens": value}), INSTANCE)

    assert request.prompt_tokens is None


def test_an_impossible_whole_gives_way_to_the_spans_own_end() -> None:
    request = timing(told({**VLLM, "gen_ai.latency.e2e": -3.0}), INSTANCE)

    assert request.end_ns == START_NS + 841_682_801


def test_a_span_received_twice_has_one_id() -> None:
    first = timing(told(VLLM), INSTANCE).request_id

    assert timing(told(VLLM), INSTANCE).request_id == first
    assert timing(told(VLLM, span_id="1" * 16), INSTANCE).request_id != first
