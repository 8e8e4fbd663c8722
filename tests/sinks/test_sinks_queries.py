"""Views, summaries and shipped queries: answers on small known data that came the writer's way."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from sinks_support import MS, T0, S, write

from latencyprism.schemas import topics
from latencyprism.schemas.records import (
    Ack,
    AgentSample,
    Alert,
    BatchProfile,
    Cause,
    Command,
    EngineSample,
    Evidence,
    HistogramDelta,
    HostSample,
    KernelSample,
    ProcessSample,
    RequestTiming,
    SourceHealth,
    StackCount,
    StackProfile,
    StageShare,
    StageTime,
    StepBatch,
)
from latencyprism.sinks import queries
from latencyprism.sinks.config import StoreConfig

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

pytest_plugins = ("sinks_fixtures",)

M0 = T0 - T0 % (60 * S)
"""Start of a minute."""


def request(number: int, **values: Any) -> RequestTiming:
    """An exchange of one part: arrives at M0 + number s, ten chunks 10 ms apart from 100 ms on."""
    arrival = M0 + number * S
    defaults: dict[str, Any] = {
        "request_id": f"r{number}",
        "part": 0,
        "state": "complete",
        "instance": "a:1",
        "source": "network",
        "observed_at_ns": arrival + 200 * MS,
        "endpoint": "/v1/completions",
        "model": "m",
        "streaming": True,
        "status": 200,
        "arrival_ns": arrival,
        "first_token_ns": arrival + 100 * MS,
        "end_ns": arrival + 200 * MS,
        "chunks_before": 0,
        "chunk_base_ns": arrival + 100 * MS,
        "chunk_deltas_us": (10_000,) * 9,
    }
    return RequestTiming(**(defaults | values))


def window(number: int, **values: Any) -> BatchProfile:
    """A normal window of 1 s that starts at M0 + number s."""
    start = M0 + number * S
    defaults: dict[str, Any] = {
        "instance": "a:1",
        "service": "m",
        "model": "m",
        "window_start_ns": start,
        "window_end_ns": start + S,
        "closed_at_ns": start + S,
        "requests_started": 1,
        "requests_finished": 1,
        "requests_failed": 0,
        "requests_open": 2,
        "chunks": 10,
        "steps": 10,
        "late_samples": 0,
        "verdict": "normal",
        "reason": "as expected",
        "model_version": "v1",
        "score": 0.5,
        "tpot_ms": 10.0,
        "ttft_ms": 100.0,
        "e2e_ms": 200.0,
    }
    merged = defaults | values
    return BatchProfile(batch_id=f"{merged['instance']}-{number}", **merged)


def alert(number: int, **values: Any) -> Alert:
    """A state of one problem, updated at M0 + number s."""
    defaults: dict[str, Any] = {
        "alert_id": f"p-{number}",
        "fingerprint": "p",
        "state": "firing",
        "severity": "warning",
        "verdict": "fault",
        "instance": "a:1",
        "service": "m",
        "stage": "decode",
        "fired_ns": M0 + S,
        "updated_ns": M0 + number * S,
        "first_batch_ns": M0 + 500 * MS,
        "observed_ms": 30.0,
        "expected_ms": 10.0,
        "score": 9.0,
        "threshold": 5.0,
        "reason": "decode takes three times as long",
        "peers_affected": 1,
        "peers_total": 3,
    }
    return Alert(**(defaults | values))


def ask(client: "Client", name: str, **values: str) -> list[dict[str, Any]]:
    """Rows of a shipped query by column."""
    answer = queries.run(client, queries.get(name), values)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def only(rows: Sequence[Mapping[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of the rows."""
    return [tuple(row[column] for column in columns) for row in rows]


def moment(ns: int) -> datetime:
    """A time as the client answers it: UTC, to the microsecond, without saying so."""
    whole = datetime.fromtimestamp(ns // S, UTC)
    return whole.replace(tzinfo=None, microsecond=ns % S // 1000)


def refresh(client: "Client", view: str) -> None:
    """Run a summary's refresh now and wait for it."""
    client.command(f"SYSTEM REFRESH VIEW {view}")
    client.command(f"SYSTEM WAIT VIEW {view}")


@pytest.mark.clickhouse
def test_an_exchange_is_joined_from_its_parts(client: "Client", config: StoreConfig) -> None:
    arrival = M0
    parts = [
        request(
            0,
            state="open",
            end_ns=None,
            status=None,
            chunk_deltas_us=(10_000,) * 2,
            estimated=("chunk_deltas_us",),
        ),
        request(
            0,
            part=1,
            state="open",
            model=None,
            first_token_ns=None,
            end_ns=None,
            chunks_before=3,
            chunk_base_ns=None,
            chunk_deltas_us=(),
        ),
        request(
            0,
            part=3,
            model=None,
            first_token_ns=None,
            end_ns=arrival + 500 * MS,
            chunks_before=5,
            chunk_base_ns=arrival + 300 * MS,
            chunk_deltas_us=(50_000, 50_000),
            prompt_tokens=7,
            completion_tokens=11,
        ),
    ]
    write(config, topics.TELEMETRY_REQUESTS, [*parts, parts[0]])
    (row,) = client.query("SELECT * FROM requests").named_results()
    assert (row["state"], row["model"], row["status"]) == ("complete", "m", 200)
    assert (row["parts"], row["parts_missing"], row["chunks"]) == (3, 1, 8)
    assert (row["ttft_ms"], row["e2e_ms"]) == (100.0, 500.0)
    assert (row["tpot_per"], row["tpot_ms"]) == ("tokens", 30.0)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 11)
    assert row["estimated"] == ["chunk_deltas_us"]
    assert row["last_chunk"] == moment(arrival + 400 * MS)


@pytest.mark.clickhouse
def test_of_several_accounts_of_a_request_the_best_counts(
    client: "Client", config: StoreConfig
) -> None:
    def told(number: int, *sources: str) -> list[RequestTiming]:
        return [request(number, request_id=f"{s}-{number}", source=s) for s in sources]

    records = (
        *told(1, "otlp", "gateway", "network"),
        *told(61, "otlp", "gateway"),
        *told(121, "otlp"),
        *told(181, "import"),
    )
    write(config, topics.TELEMETRY_REQUESTS, records)

    counted = client.query("SELECT source FROM requests ORDER BY arrival").result_rows
    assert [source for (source,) in counted] == ["network", "gateway", "otlp", "import"]
    assert len(ask(client, "slow_requests")) == 4


@pytest.mark.clickhouse
def test_what_was_not_seen_of_an_exchange_is_null(client: "Client", config: StoreConfig) -> None:
    unseen = request(
        0,
        state="open",
        model=None,
        status=None,
        first_token_ns=None,
        end_ns=None,
        chunk_base_ns=None,
        chunk_deltas_us=(),
    )
    one_chunk = request(1, chunk_deltas_us=())
    write(config, topics.TELEMETRY_REQUESTS, [unseen, one_chunk])
    first, second = client.query("SELECT * FROM requests ORDER BY arrival").named_results()
    for name in ("model", "status", "ttft_ms", "tpot_ms", "e2e_ms", "ended", "prompt_tokens"):
        assert first[name] is None, name
    assert (first["chunks"], second["chunks"], second["tpot_ms"]) == (0, 1, None)


@pytest.mark.clickhouse
def test_steps_come_one_a_row_and_unknown_tokens_are_null(
    client: "Client", config: StoreConfig
) -> None:
    batch = StepBatch(
        instance="a:1",
        source="log",
        observed_at_ns=M0 + S,
        start_ns=(M0, M0 + 500 * MS),
        duration_us=(1500, 2500),
        decode_sequences=(3, 4),
        joined=(1, 0),
        left=(0, 2),
        prefill_tokens=(-1, 0),
        context_tokens=(70, -1),
    )
    write(config, topics.TELEMETRY_STEPS, [batch, batch])
    rows = client.query(
        "SELECT start, duration_ms, decode_sequences, joined, left, prefill_tokens, context_tokens"
        " FROM steps ORDER BY start"
    ).result_rows
    assert rows == [
        (moment(M0), 1.5, 3, 1, 0, None, 70),
        (moment(M0 + 500 * MS), 2.5, 4, 0, 2, 0, None),
    ]


@pytest.mark.clickhouse
def test_problems_hold_the_last_state_of_each(client: "Client", config: StoreConfig) -> None:
    again = alert(90, alert_id="q", fired_ns=M0 + 90 * S)
    ended = alert(9, state="resolved", resolved_ns=M0 + 9 * S)
    write(config, topics.ALERTS, [alert(1), alert(5, state="updated"), ended, ended, again])
    rows = client.query("SELECT alert_id, state FROM problems ORDER BY fired").result_rows
    assert rows == [("p-9", "resolved"), ("q", "firing")]


@pytest.mark.clickhouse
def test_summaries_count_once_what_is_delivered_again(
    client: "Client", config: StoreConfig
) -> None:
    sent = [request(0), request(1, end_ns=M0 + S + 400 * MS), request(61, status=500)]
    open_part = request(2, state="open", end_ns=None)
    view, sql = (
        "requests_per_minute_refresh",
        (
            "SELECT minute, sum(requests), sum(failed), "
            "quantilesTDigestMerge(0.5, 0.95, 0.99)(e2e_ms)[3] FROM requests_per_minute "
            "GROUP BY minute ORDER BY minute"
        ),
    )
    write(config, topics.TELEMETRY_REQUESTS, [*sent, open_part])
    refresh(client, view)
    first = client.query(sql).result_rows
    assert [row[1:3] for row in first] == [(2, 0), (1, 1)]
    assert first[0][3] == pytest.approx(400, rel=0.01)
    for _ in range(2):
        write(config, topics.TELEMETRY_REQUESTS, sent)
        refresh(client, view)
    assert client.query(sql).result_rows == first
    late = request(2, part=1, end_ns=M0 + 2 * S + 600 * MS)
    write(config, topics.TELEMETRY_REQUESTS, [late])
    refresh(client, view)
    counted = client.query(sql).result_rows
    assert [row[1:3] for row in counted] == [(3, 0), (1, 1)]
    assert counted[0][3] == pytest.approx(600, rel=0.01)


@pytest.mark.clickhouse
def test_window_summaries_take_the_newest_verdict(client: "Client", config: StoreConfig) -> None:
    view = "batches_per_minute_refresh"
    sql = "SELECT windows, normal, fault, silent, score_max FROM batches_per_minute"
    write(config, topics.LATENCY_BATCHES, [window(0), window(1, silent_sources=("host",))])
    refresh(client, view)
    assert client.query(sql).result_rows == [(2, 2, 0, 1, 0.5)]
    write(config, topics.LATENCY_BATCHES, [window(1, verdict="fault", score=7.0)])
    refresh(client, view)
    assert client.query(sql).result_rows == [(2, 1, 1, 0, 7.0)]


@pytest.mark.clickhouse
def test_slow_requests(client: "Client", config: StoreConfig) -> None:
    slow = request(3, end_ns=M0 + 4 * S, chunk_deltas_us=(100_000,) * 9, prompt_tokens=5)
    old = request(-7200, end_ns=M0)
    write(config, topics.TELEMETRY_REQUESTS, [request(1), slow, old])
    fault = window(4, verdict="fault", reason="decode is slow")
    write(config, topics.LATENCY_BATCHES, [window(1), window(3), fault])
    rows = ask(client, "slow_requests")
    names = ("request_id", "e2e_ms", "ttft_ms", "streaming_ms", "tpot_ms", "verdict", "reason")
    assert only(rows, *names) == [
        ("r3", 1000.0, 100.0, 900.0, 100.0, "fault", "decode is slow"),
        ("r1", 200.0, 100.0, 90.0, 10.0, "normal", "as expected"),
    ]
    assert only(ask(client, "slow_requests", limit="1"), "request_id") == [("r3",)]
    assert ask(client, "slow_requests", instance="other:1") == []
    until = "2025-06-15 15:06:02"
    assert only(ask(client, "slow_requests", until=until), "request_id") == [("r1",)]


@pytest.mark.clickhouse
def test_where_time_goes(client: "Client", config: StoreConfig) -> None:
    def stages(decode: float) -> tuple[StageTime, ...]:
        return (
            StageTime(stage="prefill", mean_ms=100.0, error_ms=5.0, how="inferred"),
            StageTime(stage="decode", mean_ms=decode, error_ms=0.0, how="measured"),
            StageTime(stage="queue", how="unknown"),
        )

    write(
        config,
        topics.LATENCY_BATCHES,
        [
            window(0, stages=stages(300.0), remainder_ms=20.0, requests_finished=3),
            window(1, stages=stages(700.0), remainder_ms=20.0),
            window(2, stages=stages(9.0), requests_finished=0),
            window(60, stages=stages(80.0), remainder_ms=20.0),
        ],
    )
    rows = ask(client, "where_time_goes")
    assert only(rows, "time", "stage", "mean_ms", "share", "measured_share") == [
        (moment(M0), "decode", 400.0, pytest.approx(0.7692), 1.0),
        (moment(M0), "prefill", 100.0, pytest.approx(0.1923), 0.0),
        (moment(M0), "remainder", 20.0, pytest.approx(0.0385), 1.0),
        (moment(M0 + 60 * S), "prefill", 100.0, 0.5, 0.0),
        (moment(M0 + 60 * S), "decode", 80.0, 0.4, 1.0),
        (moment(M0 + 60 * S), "remainder", 20.0, 0.1, 1.0),
    ]


@pytest.mark.clickhouse
def test_fault_vs_workload(client: "Client", config: StoreConfig) -> None:
    fault = {"verdict": "fault", "stage": "decode"}
    write(
        config,
        topics.LATENCY_BATCHES,
        [
            window(0),
            window(1, verdict="workload", stage="prefill"),
            window(2, **fault, score=6.0, reason="slow"),
            window(3, **fault, score=9.0, reason="very slow"),
            window(0, instance="b:1"),
            window(1, instance="b:1", verdict="unknown"),
            window(0, instance="c:1", service="other"),
        ],
    )
    columns = ("instance", "windows", "normal", "workload", "fault", "unknown", "fault_share")
    rows = ask(client, "fault_vs_workload", service="m")
    assert only(rows, *columns) == [("a:1", 4, 1, 1, 2, 0, 0.5), ("b:1", 2, 1, 0, 0, 1, 0.0)]
    assert (rows[0]["fault_stage"], rows[0]["worst_fault"]) == ("decode", "very slow")
    assert len(ask(client, "fault_vs_workload")) == 3


@pytest.mark.clickhouse
def test_alert_timeline(client: "Client", config: StoreConfig) -> None:
    ended = alert(9, state="resolved", resolved_ns=M0 + 9 * S)
    write(config, topics.ALERTS, [alert(1), alert(1), ended])
    rows = ask(client, "alert_timeline")
    assert only(rows, "time", "state", "fired_after_ms", "lasted_s", "peers") == [
        (moment(M0 + S), "firing", 500.0, None, "1 of 3"),
        (moment(M0 + 9 * S), "resolved", 500.0, 8.0, "1 of 3"),
    ]


@pytest.mark.clickhouse
def test_why_alert(client: "Client", config: StoreConfig) -> None:
    throttled = Evidence(
        family="host", signal="host.throttled_share", observed=0.4, baseline=0.01, surprise=5.0
    )
    faults = Evidence(family="host", signal="host.major_faults", observed=9.0, surprise=2.0)
    causes = (
        Cause(family="host", cause="CPU quota", score=0.8, evidence=(throttled, faults)),
        Cause(family="neighbour", cause="a busy neighbour", score=0.1),
    )
    write(config, topics.LATENCY_BATCHES, [window(1, score=7.5), window(2, score=9.25), window(3)])
    write(
        config,
        topics.ALERTS,
        [
            alert(1),
            alert(5, state="updated", causes=causes, batches=("a:1-1", "a:1-2")),
            alert(0, alert_id="old", fingerprint="o", fired_ns=M0),
        ],
    )
    rows = ask(client, "why_alert")
    assert only(rows, "rank", "family", "cause", "cause_score", "evidence") == [
        (
            1,
            "host",
            "CPU quota",
            0.8,
            ["host.throttled_share 0.4 (usually 0.01)", "host.major_faults 9 (no history)"],
        ),
        (2, "neighbour", "a busy neighbour", 0.1, []),
    ]
    columns = ("windows", "first_window", "last_window", "worst_score", "observed_ms")
    assert only(rows[:1], *columns) == [(2, moment(M0 + S), moment(M0 + 3 * S), 9.25, 30.0)]
    (old,) = ask(client, "why_alert", alert="o")
    assert (old["windows"], old["rank"]) == (0, 0)
    assert ask(client, "why_alert", alert="none") == []


@pytest.mark.clickhouse
def test_instance_vs_peers(client: "Client", config: StoreConfig) -> None:
    windows = [
        window(second, instance=instance, tpot_ms=tpot, requests_open=load)
        for second in range(3)
        for instance, tpot, load in (("a:1", 30.0, 4), ("b:1", 10.0, 4), ("c:1", 12.0, 6))
    ]
    write(config, topics.LATENCY_BATCHES, [*windows, window(0, instance="x:1", service="lone")])
    rows = ask(client, "instance_vs_peers")
    columns = ("instance", "peers", "tpot_ms", "tpot_ratio", "open_requests", "peers_open_requests")
    assert only(rows, *columns)[0][0] == "a:1"
    assert only(rows, *columns)[0][4:] == (4.0, 5.0)
    ratios = {row["instance"]: row["tpot_ratio"] for row in rows}
    assert ratios["a:1"] >= 2.5
    assert ratios["b:1"] < 1
    assert [row["peers"] for row in rows] == [2, 2, 2]


@pytest.mark.clickhouse
def test_host_pressure_around(client: "Client", config: StoreConfig) -> None:
    def host(second: float, throttled: float, runqueue: float) -> HostSample:
        return HostSample(
            instance="a:1",
            source="host",
            observed_at_ns=M0 + int(second * S),
            host="h",
            interval_ns=100 * MS,
            processes=(
                ProcessSample(pid=1, role="core", state="R", runqueue_ns=int(runqueue * MS)),
                ProcessSample(pid=2, role="api", state="S", runqueue_ns=None),
            ),
            throttled_ns=int(throttled * MS),
            psi_cpu_us=50_000,
        )

    write(config, topics.TELEMETRY_HOST, [host(0.9, 0, 10), host(5.9, 40, 80)])
    bad = window(5, verdict="fault", tpot_ms=30.0)
    write(config, topics.LATENCY_BATCHES, [window(-5), window(0), bad, window(40)])
    rows = ask(client, "host_pressure_around", around_s="10")
    columns = ("verdict", "host_age_ms", "throttled_share", "runqueue_share", "psi_cpu_share")
    assert only(rows, *columns) == [
        ("normal", None, None, None, None),
        ("normal", 100.0, 0.0, 0.1, 0.5),
        ("fault", 100.0, 0.4, 0.8, 0.5),
    ]
    at = "2025-06-15 15:06:40"
    assert only(ask(client, "host_pressure_around", at=at, around_s="1"), "time") == [
        (moment(M0 + 40 * S),)
    ]


@pytest.mark.clickhouse
def test_tail_by_model(client: "Client", config: StoreConfig) -> None:
    first = [request(n, end_ns=M0 + n * S + (100 + n) * MS) for n in range(50)]
    other = request(60, model="n", chunk_deltas_us=())
    write(config, topics.TELEMETRY_REQUESTS, [*first, other])
    refresh(client, "requests_per_minute_refresh")
    m, n = ask(client, "tail_by_model")
    assert (m["model"], m["minute"], m["exchanges"], m["failures"]) == ("m", moment(M0), 50, 0)
    assert m["e2e_p50_p95_p99_ms"] == pytest.approx([124.5, 147, 149], abs=1)
    assert m["tpot_p50_p95_p99_ms"] == [10.0, 10.0, 10.0]
    assert (n["model"], n["exchanges"], n["ttft_p50_p95_p99_ms"]) == ("n", 1, [100.0] * 3)


@pytest.mark.clickhouse
def test_commands_and_effect(client: "Client", config: StoreConfig) -> None:
    command = Command(
        command_id="c",
        target="a:1",
        service="m",
        epoch=1,
        issued_ns=M0 + 10 * S,
        lease_ms=5_000,
        action="weight",
        value=0.2,
        reason="a:1 is slow",
        alert="p",
        dry_run=False,
    )
    unheard = Command(
        command_id="d",
        target="b:1",
        service="other",
        epoch=1,
        issued_ns=M0 + 11 * S,
        lease_ms=5_000,
        action="drain",
        reason="b:1 hangs",
        dry_run=True,
    )

    def ack(router: str, effect: Any, at_s: float) -> Ack:
        return Ack(
            ack_id=f"{router}-{effect}",
            command_id="c",
            target="a:1",
            epoch=1,
            router=router,
            effect=effect,
            dry_run=False,
            at_ns=M0 + int(at_s * S),
        )

    write(config, topics.CONTROL_COMMANDS, [command, command, unheard])
    acks = [ack("x", "applied", 10.5), ack("y", "applied", 11), ack("x", "expired", 16)]
    write(config, topics.CONTROL_ACKS, [*acks, acks[0]])
    latency = [30.0] * 10 + [20.0] * 5 + [10.0] * 10
    write(
        config,
        topics.LATENCY_BATCHES,
        [window(n, tpot_ms=latency[n - 1], ttft_ms=None) for n in range(1, 26)],
    )
    heard, nobody = ask(client, "commands_and_effect")
    assert (heard["answer"], heard["applied_after_ms"]) == ("applied, expired", 500.0)
    assert (heard["tpot_before_ms"], heard["tpot_during_ms"], heard["tpot_after_ms"]) == (
        30.0,
        20.0,
        10.0,
    )
    assert heard["ttft_during_ms"] is None
    assert (nobody["answer"], nobody["applied_after_ms"]) == ("no answer", None)
    assert (nobody["dry_run"], nobody["tpot_during_ms"]) == (True, None)


@pytest.mark.clickhouse
def test_engine_health(client: "Client", config: StoreConfig) -> None:
    def scrape(second: int, instance: str = "a:1", **values: Any) -> EngineSample:
        defaults: dict[str, Any] = {
            "freshness": "fresh",
            "engine": "vllm",
            "scrape_ms": 2.0,
            "interval_ns": S,
            "running": 3.0,
            "waiting": 0.0,
            "kv_usage": 0.5,
            "generation_tokens": 50.0,
            "restarted": False,
        }
        return EngineSample(
            instance=instance,
            source="engine",
            observed_at_ns=M0 + second * S,
            **(defaults | values),
        )

    none: dict[str, Any] = dict.fromkeys(("running", "waiting", "kv_usage", "generation_tokens"))
    write(
        config,
        topics.TELEMETRY_ENGINE,
        [
            scrape(1),
            scrape(2, waiting=4.0, generation_tokens=0.0, kv_usage=0.9),
            scrape(3, **none, freshness="failed", error="timed out", interval_ns=None),
            scrape(3, instance="b:1", restarted=True),
        ],
    )
    a, b = ask(client, "engine_health")
    columns = ("instance", "scrapes", "failed", "no_progress", "fresh_age_s", "restarts")
    assert only([a, b], *columns) == [("a:1", 3, 1, 1, 1.0, 0), ("b:1", 1, 0, 0, 0.0, 1)]
    assert (a["last_error"], a["kv_usage_max"], a["waiting_max"]) == ("timed out", 0.9, 4.0)
    assert (a["tokens_per_s"], b["tokens_per_s"], b["last_error"]) == (25.0, 50.0, None)


@pytest.mark.clickhouse
def test_silent_or_late(client: "Client", config: StoreConfig) -> None:
    write(
        config,
        topics.LATENCY_BATCHES,
        [
            window(0),
            window(1, silent_sources=("host",), late_samples=2),
            window(2, silent_sources=("engine", "host")),
            window(70, late_samples=1),
            window(130),
        ],
    )
    rows = ask(client, "silent_or_late")
    columns = ("windows", "silent_windows", "sources", "silent_from", "silent_until", "late")
    assert only(rows, *columns) == [
        (3, 2, ["engine", "host"], moment(M0 + S), moment(M0 + 3 * S), 2),
        (1, 0, [], None, None, 1),
    ]


@pytest.mark.clickhouse
def test_collectors_health(client: "Client", config: StoreConfig) -> None:
    def agent(number: int, **values: Any) -> AgentSample:
        at = M0 + number * S
        head: dict[str, Any] = {
            "instance": "h1",
            "source": "agent",
            "host": "h1",
            "boot_ns": M0,
            "uptime_s": 1.0,
        }
        return AgentSample(**(head | {"observed_at_ns": at} | values))

    samples = [
        agent(-900, cpu_pct=50.0, rss_mb=500.0, settings_error="sources: no such thing"),
        agent(1, cpu_pct=1.0, rss_mb=60.0, published_bytes_s=1000.0, dropped={"requests full": 1}),
        agent(
            2,
            cpu_pct=2.0,
            rss_mb=50.0,
            published_bytes_s=3000.0,
            dropped={"requests full": 3, "host full": 4},
            sources=(
                SourceHealth(name="host", state="running", failures=0),
                SourceHealth(name="xpu", state="unavailable", failures=0, error="no driver"),
            ),
        ),
        agent(3, instance="h2", host="h2"),
    ]
    write(config, topics.TELEMETRY_AGENTS, samples)

    first, second = ask(client, "collectors_health")
    assert first == {
        "agent": "h1",
        "host": "h1",
        "seen": datetime.fromtimestamp((M0 + 2 * S) / S, UTC).replace(tzinfo=None),
        "cpu_pct": 1.5,
        "rss_mb": 60.0,
        "bytes_s": 2000.0,
        "dropped": 7,
        "failing": ["xpu unavailable: no driver"],
        "settings_error": None,
    }
    assert (second["agent"], second["cpu_pct"], second["dropped"]) == ("h2", None, 0)


@pytest.mark.clickhouse
def test_stacks_at_alert(client: "Client", config: StoreConfig) -> None:
    def profile(number: int, **values: Any) -> StackProfile:
        head: dict[str, Any] = {
            "instance": "a:1",
            "source": "stacks",
            "host": "h",
            "pid": 7,
            "role": "engine",
        }
        told: dict[str, Any] = {"duration_ms": 5000.0, "rate_hz": 20.0, "samples": 100, "failed": 2}
        return StackProfile(**(head | told | {"observed_at_ns": M0 + number * S} | values))

    profiles = [
        profile(
            1,
            fingerprint="p",
            alert_id="p-1",
            stages=(StageShare(stage="execute", samples=75), StageShare(stage="idle", samples=25)),
            stacks=(StackCount(stack="main;step;execute", samples=75),),
        ),
        profile(2, samples=0, error="py-spy can't read llama-server: it is no Python"),
    ]
    write(config, topics.TELEMETRY_STACKS, profiles)

    (row,) = ask(client, "stacks_at_alert", fingerprint="p")
    assert row["stages"] == ["execute 75 %", "idle 25 %"]
    assert row["most_frequent"] == "main;step;execute"
    newest, _ = ask(client, "stacks_at_alert")
    assert (newest["stages"], newest["fingerprint"]) == ([], None)
    assert "no Python" in newest["error"]


@pytest.mark.clickhouse
def test_kernel_times(client: "Client", config: StoreConfig) -> None:
    def kernel(number: int, counts: tuple[float, ...], **values: Any) -> KernelSample:
        waits = HistogramDelta(
            stage="run_queue", count=sum(counts), sum=0.002, bounds=(0.001, 0.01), counts=counts
        )
        head: dict[str, Any] = {
            "instance": "a:1",
            "source": "kernel",
            "host": "h",
            "interval_ns": S,
        }
        told: dict[str, Any] = {
            "histograms": (waits,),
            "observed_at_ns": M0 + number * S,
            "lost": 1,
        }
        return KernelSample(**(head | told | values))

    samples = [kernel(1, (99.0, 0.0, 0.0)), kernel(2, (0.0, 1.0, 0.0)), kernel(61, (0.0, 0.0, 1.0))]
    write(config, topics.TELEMETRY_KERNEL, samples)

    first, second = ask(client, "kernel_times", instance="a:1")
    assert (first["times"], first["mean_ms"], first["p99_below_ms"]) == (100, 0.04, 1.0)
    assert (first["stage"], first["lost"]) == ("run_queue", 2)
    assert (second["times"], second["p99_below_ms"]) == (1, float("inf"))
    assert len(ask(client, "kernel_times", minutes="0")) == 0


@pytest.mark.clickhouse
def test_workload_shift(client: "Client", config: StoreConfig) -> None:
    before = [window(n, features={"batch": 2.0, "prompt_tokens": 100.0}) for n in range(60)]
    now = [window(n, features={"batch": 2.0, "prompt_tokens": 400.0}) for n in range(60, 120)]
    write(config, topics.LATENCY_BATCHES, [*before, *now])
    rows = ask(client, "workload_shift", minutes="1")
    assert only(rows, "feature", "before", "now", "ratio") == [
        ("prompt_tokens", 100.0, 400.0, 4.0),
        ("batch", 2.0, 2.0, 1.0),
    ]


@pytest.mark.clickhouse
@pytest.mark.parametrize("query", queries.available(), ids=lambda query: query.name)
def test_a_query_names_its_columns_even_without_data(
    client: "Client", query: queries.Query
) -> None:
    answer = queries.run(client, query)
    assert len(answer.columns) >= 5
    assert answer.rows == []


@pytest.mark.clickhouse
def test_a_wrong_parameter_is_named(client: "Client") -> None:
    query = queries.get("slow_requests")
    with pytest.raises(queries.QueryError, match="no parameter 'hours'; there are minutes, until"):
        queries.run(client, query, {"hours": "1"})
    with pytest.raises(queries.QueryError, match=r"minutes='soon' \(UInt32\)"):
        queries.run(client, query, {"minutes": "soon"})


def test_every_parameter_is_used_and_told_with_its_type() -> None:
    assert len(queries.available()) >= 10
    for query in queries.available():
        assert query.question.endswith("?")
        body = "\n".join(line for line in query.sql.splitlines() if not line.startswith("--"))
        for parameter in query.parameters:
            used = body.count(f"{{{parameter.name}:{parameter.type}}}")
            assert used == body.count(f"{{{parameter.name}:") > 0, (query.name, parameter.name)
        assert body.count("{") == sum(body.count(f"{{{p.name}:") for p in query.parameters)


def test_an_unknown_query_names_those_there_are() -> None:
    with pytest.raises(queries.QueryError, match="there are alert_timeline, collectors_health"):
        queries.get("nope")


@pytest.mark.parametrize(
    "text",
    ["SELECT 1", "-- name: a\nSELECT 1", "-- name: a\n-- question: b?\n-- parameter x\nSELECT 1"],
)
def test_a_file_that_is_no_query_is_refused(text: str) -> None:
    with pytest.raises(queries.QueryError, match=r"a\.sql"):
        queries.parse("a.sql", text)
