"""The simulated server as its clients and its scrapers see it: a real process over real HTTP."""

import asyncio
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from latencyprism.simulator.load import LoadConfig, Outcome, run_load, summarise
from latencyprism.simulator.workload import Phase

# Families of vLLM 0.32 that tell of requests, tokens and stages.
VLLM_FAMILIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "process_cpu_seconds": "counter",
    "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
}


class Server:
    """A running simulator."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "latencyprism.simulator.server", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://"), line
        self.url = line.removeprefix("listening on ").strip()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def metrics(self) -> dict[str, Any]:
        """Families by name, as Prometheus' own client reads them."""
        page = httpx.get(f"{self.url}/metrics")
        return {family.name: family for family in text_string_to_metric_families(page.text)}

    def value(self, name: str, **labels: str) -> float:
        """The one sample of this name whose labels contain these."""
        (value,) = [
            sample.value
            for family in self.metrics().values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return float(value)

    def fault(self, **body: object) -> None:
        httpx.post(f"{self.url}/simulator/fault", json=body).raise_for_status()

    def load(self, *phases: Phase, **more: Any) -> list[Outcome]:
        return asyncio.run(run_load(LoadConfig(url=self.url, **more), phases))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    server = Server("--seed", "1", "--model", "tiny")
    yield server
    assert server.stop() == 0


@pytest.fixture
def server(shared_server: Server) -> Server:
    httpx.delete(f"{shared_server.url}/simulator/fault").raise_for_status()
    return shared_server


def stream(server: Server, path: str = "/v1/completions", **body: object) -> list[str]:
    """Data of the events of a streamed answer."""
    prompt: dict[str, object] = {"prompt": [1, 2, 3]}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "a few words"}]}
    with httpx.stream(
        "POST", server.url + path, json={"stream": True, "max_tokens": 4, **prompt, **body}
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def itl_ms(server: Server, tokens: int = 40) -> list[float]:
    phase = Phase(duration_s=0.05, mode="burst", requests=1, output_scale=100)
    outcomes = server.load(phase_of(phase, tokens), model="tiny")
    assert outcomes[0].error is None
    return list(outcomes[0].itl_ms)


def phase_of(phase: Phase, tokens: int) -> Phase:
    return Phase(
        duration_s=phase.duration_s,
        mode=phase.mode,
        requests=phase.requests,
        prompt_scale=0.01,
        output_scale=phase.output_scale,
        max_output_tokens=tokens,
    )


def test_completion_streams_as_vllm_does(server: Server) -> None:
    *chunks, usage, done = stream(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    told = json.loads(usage)
    assert told["choices"] == []
    assert told["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    events = [json.loads(chunk) for chunk in chunks]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "length"]
    assert all(e["choices"][0]["text"] for e in events)
    assert {e["object"] for e in events} == {"text_completion"}
    assert {e["model"] for e in events} == {"tiny"}
    assert len({e["id"] for e in events}) == 1


def test_chat_opens_with_the_role_and_has_no_usage_unless_asked(server: Server) -> None:
    opening, *chunks, done = stream(server, "/v1/chat/completions")
    assert json.loads(opening)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert len(deltas) == 4
    assert all(delta["content"] for delta in deltas)
    assert done == "[DONE]"


def test_whole_answer_has_the_text_and_the_usage(server: Server) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3},
    ).json()
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["message"]["content"].split()) == 3
    assert answer["usage"]["prompt_tokens"] == 2


def test_headers_leave_before_the_first_token(server: Server) -> None:
    server.fault(kind="added", value=200, duration_s=30)
    (outcome,) = server.load(
        phase_of(Phase(duration_s=0.05, mode="burst", requests=1), 2), model="tiny"
    )
    assert outcome.first_byte_ns is not None
    assert outcome.first_byte_ns - outcome.sent_ns < 150e6
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms > 200


def test_models_and_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    models = httpx.get(f"{server.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_small_answers_do_not_wait_for_a_delayed_acknowledgement(server: Server) -> None:
    with httpx.Client() as client:
        took_s = [client.get(f"{server.url}/v1/models").elapsed.total_seconds() for _ in range(9)]
    assert statistics.median(took_s) < 0.03  # waiting would take 40 ms


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "no JSON"),
        (b"[]", 400, "no JSON object"),
        (b'{"prompt": "a", "model": "other"}', 404, "'other' does not exist"),
        (b'{"prompt": {}}', 400, "prompt must be"),
        (b'{"prompt": ""}', 400, "0 prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens must be"),
        (b'{"prompt": "a", "max_tokens": 99999}', 400, "this model takes 16384"),
        (b'{"prompt": "a", "n": 2}', 400, "n must be 1"),
    ],
)
def test_bad_request_is_refused_in_words(
    server: Server, body: bytes, status: int, words: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_metrics_have_the_names_and_kinds_of_vllm(server: Server) -> None:
    stream(server)
    families = server.metrics()
    assert {name: families[name].type for name in VLLM_FAMILIES} == VLLM_FAMILIES
    for name, family in families.items():
        for sample in family.samples:
            if name.startswith("vllm:") and "info" not in name:
                assert sample.labels["engine"] == "0"
                assert sample.labels["model_name"] == "tiny"
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            count = next(s.value for s in family.samples if s.name.endswith("_count"))
            assert buckets == sorted(buckets)
            assert buckets[-1] == count


def test_counters_tell_what_was_served(server: Server) -> None:
    def told() -> list[float]:
        return [
            server.value("vllm:generation_tokens_total"),
            server.value("vllm:prompt_tokens_total"),
            server.value("vllm:request_success_total", finished_reason="length"),
            server.value("vllm:time_to_first_token_seconds_count"),
            server.value("vllm:inter_token_latency_seconds_count"),
        ]

    before = told()
    stream(server, max_tokens=7)
    assert [a - b for a, b in zip(told(), before, strict=True)] == [7, 3, 1, 1, 6]


def test_shared_prefix_is_cached_until_reset(server: Server) -> None:
    prompt = list(range(300))

    def cached() -> int:
        usage = json.loads(
            stream(server, prompt=prompt, stream_options={"include_usage": True})[-2]
        )["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 256]
    httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
    assert cached() == 0


def test_slowdown_shows_in_the_gaps_between_tokens_and_ends_when_cleared(server: Server) -> None:
    normal = statistics.median(itl_ms(server))
    server.fault(kind="slowdown", value=3, duration_s=60)
    slowed = statistics.median(itl_ms(server))
    httpx.delete(f"{server.url}/simulator/fault").raise_for_status()
    after = statistics.median(itl_ms(server))
    assert 5 < normal < 12
    assert slowed / normal == pytest.approx(3, rel=0.25)
    assert after == pytest.approx(normal, rel=0.25)


def test_steps_keep_time_to_about_a_millisecond(server: Server) -> None:
    tokens = 150
    counted = "vllm:inter_token_latency_seconds_sum"
    before = server.value(counted)
    seen_s = sum(itl_ms(server, tokens)) / 1e3
    assert seen_s == pytest.approx(server.value(counted) - before, abs=0.1)


def test_pause_shows_as_regular_gaps(server: Server) -> None:
    server.fault(kind="pause", value=120, every_ms=300, duration_s=60)
    gaps = itl_ms(server, 100)
    assert sum(gap > 100 for gap in gaps) == pytest.approx(sum(gaps) / 300, abs=1.5)


def test_network_delay_moves_the_first_token_and_not_the_gaps(server: Server) -> None:
    server.fault(kind="network_delay", value=150, duration_s=60)
    (outcome,) = server.load(
        phase_of(Phase(duration_s=0.05, mode="burst", requests=1, output_scale=9), 30),
        model="tiny",
    )
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms > 150
    assert statistics.median(outcome.itl_ms) < 15


def test_hung_engine_says_it_is_well_and_idle_and_goes_on_when_cleared(server: Server) -> None:
    server.fault(kind="hang", duration_s=60)

    async def hang() -> tuple[list[Outcome], float]:
        begun = time.monotonic()
        config = LoadConfig(url=server.url, model="tiny")
        phase = Phase(duration_s=0.01, mode="burst", requests=2, max_output_tokens=3)
        load = asyncio.create_task(run_load(config, [phase]))
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
            page = (await client.get("/metrics")).text
            assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page
            await client.delete("/simulator/fault")
        return await load, time.monotonic() - begun

    outcomes, took_s = asyncio.run(hang())
    assert [o.error for o in outcomes] == [None, None]
    assert all(o.ttft_ms and o.ttft_ms > 400 for o in outcomes)
    assert took_s < 10


def test_burst_raises_the_time_in_the_queue(server: Server) -> None:
    name = "vllm:request_queue_time_seconds_sum"
    before = server.value(name)
    few = Phase(duration_s=0.1, mode="burst", requests=2, max_output_tokens=20, prompt_scale=0.02)
    server.load(few, model="tiny")
    calm = server.value(name)
    burst = Phase(
        duration_s=0.1, mode="burst", requests=60, max_output_tokens=20, prompt_scale=0.02
    )
    outcomes = server.load(burst, model="tiny")
    assert summarise(outcomes).failed == 0
    assert (server.value(name) - calm) / 60 > 20 * max(0.002, (calm - before) / 2)


def test_client_that_leaves_frees_its_place(server: Server) -> None:
    aborted = server.value("vllm:request_success_total", finished_reason="abort")
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": "a", "max_tokens": 10_000, "stream": True},
    ) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert server.value("vllm:num_requests_running") == 1
    for _ in range(100):
        if server.value("vllm:num_requests_running") == 0:
            break
        time.sleep(0.02)
    assert server.value("vllm:num_requests_running") == 0
    assert server.value("vllm:request_success_total", finished_reason="abort") == aborted + 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"kind": "nonsense"}, "kind must be one of"),
        ({"kind": "slowdown", "value": "x"}, "value must be a number"),
        ({"kind": "slowdown", "value": 2, "duration_s": 0}, "duration_s must be"),
        ({"kind": "slowdown", "value": 0}, "would stop time"),
        ({"kind": "pause", "value": 5, "evry_ms": 3}, "unknown: evry_ms"),
    ],
)
def test_fault_that_means_nothing_is_refused(
    server: Server, body: dict[str, object], words: str
) -> None:
    answer = httpx.post(f"{server.url}/simulator/fault", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_load_ends_on_time_and_tells_what_was_cut(server: Server) -> None:
    server.fault(kind="hang", duration_s=60)
    begun = time.monotonic()
    phases = [Phase(duration_s=0.5, mode="closed", concurrency=3)]
    outcomes = server.load(*phases, model="tiny", grace_s=0.5)
    assert time.monotonic() - begun < 3
    assert [o.error for o in outcomes] == ["cut off at the end of the load"] * 3


def test_load_beyond_its_bound_is_counted_and_not_sent(server: Server) -> None:
    phase = Phase(duration_s=0.1, mode="burst", requests=5, max_output_tokens=2)
    outcomes = server.load(phase, model="tiny", max_in_flight=2)
    assert sum(o.error is None for o in outcomes) == 2
    assert [o.error for o in outcomes if o.error] == ["not sent: 2 were in flight"] * 3


def test_open_load_keeps_its_rate_and_asks_the_same_for_the_same_seed(server: Server) -> None:
    phase = Phase(
        duration_s=1, rate_rps=30, prompt_scale=0.02, max_output_tokens=3, shared_share=0.2
    )
    first, second = (server.load(phase, model="tiny", chat=True, seed=4) for _ in range(2))
    assert [(o.prompt_tokens, o.output_tokens) for o in first] == [
        (o.prompt_tokens, o.output_tokens) for o in second
    ]
    assert 12 <= len(first) <= 55
    for outcomes in (first, second):
        offsets = [(b.sent_ns - a.sent_ns) / 1e9 for a, b in itertools.pairwise(outcomes)]
        assert sum(offsets) < 1.1
        assert all(o.completion_tokens == o.output_tokens for o in outcomes)


def test_load_on_a_server_that_is_away_or_dies_fails_in_words() -> None:
    server = Server()
    phase = Phase(duration_s=0.5, mode="burst", requests=2, output_scale=100, prompt_scale=0.01)

    async def die() -> list[Outcome]:
        load = asyncio.create_task(run_load(LoadConfig(url=server.url), [phase]))
        await asyncio.sleep(0.3)
        server.process.kill()
        return await load

    died = asyncio.run(die())
    server.stop()
    assert all(o.status == 200 and o.error and o.chunks_ns for o in died)
    away = server.load(phase)
    assert all(o.status is None and "ClientConnector" in (o.error or "") for o in away)
    summary = summarise([*died, *away])
    assert (summary.requests, summary.failed, summary.e2e_ms.n) == (4, 4, 0)


def test_server_ends_cleanly_with_streams_open() -> None:
    server = Server()

    async def open_stream() -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{server.url}/v1/completions",
                json={"prompt": "a", "max_tokens": 10_000, "stream": True},
            ) as response,
        ):
            await response.content.readline()
            return await asyncio.to_thread(server.stop)

    assert asyncio.run(open_stream()) == 0
