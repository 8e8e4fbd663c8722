import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks import profile as profile_module
from latencyprism.collectors.stacks import source as source_module
from latencyprism.collectors.stacks.choice import Choice
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.profile import processes_of, take_profiles
from latencyprism.collectors.stacks.pyspy import Sampled, program, sample
from latencyprism.collectors.stacks.source import StacksSource
from latencyprism.collectors.stacks.stages import Profile, fold, stage_of
from latencyprism.schemas.records import Alert, StackProfile
from latencyprism.schemas.topics import TELEMETRY_STACKS

T0 = 1_800_000_000_000_000_000
ONCE = StacksConfig(duration_s=1)


def has_py_spy() -> bool:
    try:
        program(ONCE)
    except UnavailableError:
        return False
    return True


PY_SPY = pytest.mark.skipif(not has_py_spy(), reason="needs py-spy (extra stacks)")


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        (
            "run_busy_loop (vllm/v1/engine/core.py);step (vllm/v1/engine/core.py);"
            "Scheduler.schedule (vllm/v1/core/sched/scheduler.py)",
            "schedule",
        ),
        (
            "step (vllm/v1/engine/core.py);execute_model (vllm/v1/executor/multiproc_executor.py);"
            "dequeue (vllm/distributed/device_communicators/shm_broadcast.py)",
            "execute",
        ),
        (
            "worker_busy_loop (vllm/v1/executor/multiproc_executor.py);"
            "execute_model (vllm/v1/worker/cpu_worker.py);"
            "_sample (vllm/v1/worker/gpu_model_runner.py)",
            "sample",
        ),
        (
            "worker_busy_loop (vllm/v1/executor/multiproc_executor.py);"
            "dequeue (vllm/distributed/device_communicators/shm_broadcast.py)",
            "wait",
        ),
        ("step (core.py);update_from_output (vllm/v1/core/sched/scheduler.py)", "update"),
        (
            "output_handler (vllm/v1/engine/async_llm.py);"
            "process_outputs (vllm/v1/engine/output_processor.py)",
            "detokenize",
        ),
        (
            "create_completion (vllm/entrypoints/openai/serving.py);"
            "_tokenize_prompt (vllm/renderers/base.py);encode (tokenizers/init.py)",
            "tokenize",
        ),
        ("event_loop_overlap (sglang/srt/managers/scheduler.py);run_batch (s.py)", "execute"),
        ("get_next_batch_to_run (sglang/srt/managers/scheduler.py)", "schedule"),
        ("process_batch_result_decode (sglang/srt/managers/x.py)", "update"),
        ("Decode (text_generation_server/server.py);forward (modeling.py)", "execute"),
        (
            "EngineCore.step (vllm/v1/engine/core.py);"
            "FutureWrapper._wait_for_response (vllm/v1/executor/multiproc_executor.py);"
            "SpinCondition.wait (vllm/distributed/device_communicators/shm_broadcast.py);"
            "sched_yield (vllm/distributed/utils.py)",
            "execute",
        ),
        ("run_forever (asyncio/base_events.py);select (selectors.py)", "wait"),
        ("main (vllm/entrypoints/cli/main.py);Runner.run (asyncio/runners.py)", "wait"),
        ("Thread.run (threading.py);_worker (concurrent/futures/thread.py)", "wait"),
        ("Thread.run (threading.py);wait (threading.py)", "wait"),
        ("run (uvicorn/server.py);send (starlette/responses.py)", "api"),
        ("<module> (own.py);something (own.py)", "other"),
    ],
)
def test_stacks_are_told_apart_by_function_and_file(stack: str, stage: str) -> None:
    assert stage_of(stack.split(";")) == stage


def test_samples_are_counted_by_stage_and_stack_without_folders() -> None:
    text = (
        "step (vllm/v1/engine/core.py);schedule (vllm/v1/core/sched/scheduler.py) 3\n"
        "step (vllm/v1/engine/core.py);execute_model (vllm/v1/executor/x.py) 20\n"
        "no count here\n"
        "5\n"
        "loop (/home/somebody/secret-project/own.py) 1\n"
    )

    assert fold(text, most=2) == Profile(
        stages=(("execute", 20), ("schedule", 3), ("other", 1)),
        stacks=(
            ("step (core.py);execute_model (x.py)", 20),
            ("step (core.py);schedule (scheduler.py)", 3),
        ),
    )
    assert fold(text).stacks[2] == ("loop (own.py)", 1)
    assert fold(text).samples == 24


BUSY = textwrap.dedent("""
    import time

    def schedule(secret_prompt):
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass

    def execute_model(secret_prompt):
        time.sleep(0.03)

    print("ready", flush=True)
    while True:
        schedule("VERY-SECRET")
        execute_model("VERY-SECRET")
""")


@contextmanager
def running(*command: str) -> Iterator[int]:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[int]:
    """Process id of a Python program that schedules and executes."""
    path = tmp_path / "busy.py"
    path.write_text(BUSY)
    with running(sys.executable, str(path)) as pid:
        yield pid


@PY_SPY
def test_real_process_is_sampled_by_its_functions_alone(busy: int, tmp_path: Path) -> None:
    sampled = sample(busy, ONCE)

    assert sampled.error is None
    assert sampled.profile is not None
    assert 10 <= sampled.profile.samples + sampled.failed <= 25
    assert {"schedule", "execute"} <= dict(sampled.profile.stages).keys()
    text = str(sampled.profile)
    assert "schedule (busy.py)" in text
    assert "SECRET" not in text.upper()
    assert str(tmp_path) not in text


@PY_SPY
def test_program_that_is_not_python_is_told() -> None:
    with running("sh", "-c", "echo ready; sleep 20; true") as pid:
        sampled = sample(pid, ONCE)

    assert sampled.profile is None
    assert "other languages" in str(sampled.error)


@PY_SPY
def test_process_that_is_gone_is_told() -> None:
    with running(sys.executable, "-c", "print()") as pid:
        pass

    assert sample(pid, ONCE).error


@PY_SPY
def test_sampling_is_ended_early_on_request(busy: int) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    sampled = sample(busy, StacksConfig(duration_s=60), stop)

    assert time.monotonic() - began < 2
    assert sampled.error == "ended early"


def test_missing_py_spy_is_told_with_what_to_install() -> None:
    with pytest.raises(UnavailableError, match=r"latencyprism\[stacks\]"):
        program(StacksConfig(program="/nowhere/py-spy"))


def test_refusal_by_the_kernel_says_what_is_needed(tmp_path: Path) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    fake.chmod(0o755)
    sampled = sample(1, StacksConfig(duration_s=1, program=str(fake)))

    assert sampled.profile is None
    assert "CAP_SYS_PTRACE" in str(sampled.error)


def fake_sample(pid: int, *_: object) -> Sampled:
    profile = Profile((("execute", 3),), ((f"execute_model ({pid}.py)", 3),))
    return Sampled(profile=profile, failed=1, duration_s=1.5, error=None)


def test_core_and_workers_come_first_and_no_more_than_wished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_module, "sample", fake_sample)
    processes = {1: "child", 2: "api", 3: "worker", 4: "core", 5: "worker"}
    taken = take_profiles("h:1", processes, StacksConfig(processes=3))

    assert [(p.pid, p.role) for p in taken] == [(4, "core"), (3, "worker"), (5, "worker")]
    assert (taken[0].samples, taken[0].failed, taken[0].duration_ms) == (3, 1, 1500)
    assert take_profiles("h:1", {}, ONCE) == []


class Told:
    """Alerts of a list, then none."""

    def __init__(self, *alerts: Alert) -> None:
        self.waiting = deque(alerts)
        self.closed = False

    def poll(self, timeout_s: float) -> Iterator[Alert]:
        if self.waiting:
            yield self.waiting.popleft()
        else:
            time.sleep(min(timeout_s, 0.01))

    def close(self) -> None:
        self.closed = True


def alert(**changes: object) -> Alert:
    values: dict[str, object] = {
        "alert_id": "a1",
        "fingerprint": "f1",
        "state": "firing",
        "severity": "warning",
        "verdict": "fault",
        "instance": "127.0.0.1:8000",
        "service": "m",
        "stage": "decode",
        "fired_ns": T0,
        "updated_ns": T0,
        "first_batch_ns": T0,
        "score": 9.0,
        "threshold": 3.0,
        "reason": "slow",
        "peers_affected": 1,
        "peers_total": 1,
    }
    return Alert(**(values | changes))  # type: ignore[arg-type]


def run(
    monkeypatch: pytest.MonkeyPatch,
    *alerts: Alert,
    clock: Iterator[float] | None = None,
    config: StacksConfig = ONCE,
) -> tuple[list[StackProfile], dict[str, int]]:
    """Profiles and counts that come of the alerts."""
    monkeypatch.setattr(profile_module, "sample", fake_sample)
    monkeypatch.setattr(source_module, "program", lambda _: "py-spy")
    told, stop, publisher = Told(*alerts), threading.Event(), MemoryPublisher()
    source = StacksSource(
        ("http://127.0.0.1:8000",),
        config,
        lambda: told,
        processes=lambda port: {port: "core"},
        wall_ns=lambda: T0 + 1_000_000_000,
        monotonic_s=lambda: next(clock) if clock else 0.0,
    )
    thread = threading.Thread(target=source.run, args=(publisher, stop))
    thread.start()
    deadline = time.monotonic() + 10
    while told.waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert told.closed
    packs = publisher.flush()
    assert {packed.topic.name for packed in packs} <= {TELEMETRY_STACKS.name}
    return [s for packed in packs for s in packed.pack.samples], dict(source.counts)


def test_firing_alert_has_its_servers_processes_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    (profile,), counts = run(monkeypatch, alert())

    assert (profile.alert_id, profile.fingerprint) == ("a1", "f1")
    assert (profile.instance, profile.pid, profile.role) == ("127.0.0.1:8000", 8000, "core")
    assert counts == {"profiles": 1}


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (alert(state="updated"), {"no news": 1}),
        (alert(verdict="workload"), {"no fault": 1}),
        (alert(state="resolved"), {}),
        (alert(instance="other:1"), {}),
        (alert(fired_ns=T0 - 120_000_000_000), {"late": 1}),
    ],
)
def test_other_alerts_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, other: Alert, counts: dict[str, int]
) -> None:
    assert run(monkeypatch, other) == ([], counts)


def test_an_instance_is_sampled_no_more_often_than_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each alert asks for the time to be judged; one that is taken asks once more.
    clock = iter([0.0, 0.0, 30.0, 59.0, 61.0, 61.0])
    taken, counts = run(
        monkeypatch,
        alert(),
        alert(alert_id="a2"),
        alert(alert_id="a3"),
        alert(alert_id="a4"),
        clock=clock,
        config=replace(ONCE, pause_s=60),
    )

    assert [profile.alert_id for profile in taken] == ["a1", "a4"]
    assert counts == {"profiles": 2, "too soon": 2}


def test_a_profile_that_is_cut_short_is_left_to_the_next_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, choice, publisher = threading.Event(), Choice(), MemoryPublisher()
    dealt_with: list[str] = []

    class Waiting(Told):
        def poll(self, timeout_s: float) -> Iterator[Alert]:  # noqa: ARG002 - as all alerts
            yield alert()
            dealt_with.append("a1")

    def ended(*_: object) -> Sampled:
        stop.set()
        return Sampled(profile=None, failed=0, duration_s=0.1, error="ended early")

    def source() -> StacksSource:
        return StacksSource(
            ("http://127.0.0.1:8000",),
            ONCE,
            Waiting,
            choice=choice,
            processes=lambda port: {port: "core"},
            wall_ns=lambda: T0,
        )

    monkeypatch.setattr(profile_module, "sample", ended)
    monkeypatch.setattr(source_module, "program", lambda _: "py-spy")
    source().run(publisher, stop)
    assert (dealt_with, publisher.flush()) == ([], [])

    def taken(*_: object) -> Sampled:
        stop.set()
        return fake_sample(1)

    stop.clear()
    monkeypatch.setattr(profile_module, "sample", taken)
    source().run(publisher, stop)
    (packed,) = publisher.flush()
    assert [profile.alert_id for profile in packed.pack.samples] == ["a1"]


def test_source_without_py_spy_is_unavailable() -> None:
    source = StacksSource((), StacksConfig(program="/nowhere/py-spy"), Told)

    with pytest.raises(UnavailableError, match="/nowhere/py-spy"):
        source.run(MemoryPublisher(), threading.Event())


def test_processes_are_found_by_their_port() -> None:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            found = processes_of(int(process.stdout.readline()))
        finally:
            process.kill()

    assert process.pid in found
