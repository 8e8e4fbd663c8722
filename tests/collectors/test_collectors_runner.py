import random
import threading
import time

import pytest
from agent_support import Beating, Failing, wait_for
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors import runner as runner_module
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.collectors.runner import Runner, ThreadClock, backoff_s
from latencyprism.collectors.source import Emit, UnavailableError
from latencyprism.schemas.records import EngineSample
from latencyprism.schemas.topics import TELEMETRY_ENGINE


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(runner_module, "LONGEST_BACKOFF_S", 0.1)


def runner_of(source: Beating) -> Runner:
    return Runner(source, MemoryPublisher(), random.Random(1))


@given(failures=st.integers(1, 10_000), seed=st.integers())
def test_backoff_is_bounded_and_never_zero(failures: int, seed: int) -> None:
    pause = backoff_s(failures, random.Random(seed))

    assert 0.5 * runner_module.FIRST_BACKOFF_S <= pause <= runner_module.LONGEST_BACKOFF_S


def test_source_that_ends_by_itself_is_started_again() -> None:
    source = Failing("network", None)
    runner = runner_of(source)
    runner.start()
    wait_for(lambda: source.runs >= 3)
    runner.stop()

    assert runner.join(1)
    assert runner.status.error == "ended by itself"
    assert runner.status.state == "stopped"


def test_stop_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_BACKOFF_S", 20.0)
    monkeypatch.setattr(runner_module, "LONGEST_BACKOFF_S", 20.0)
    runner = runner_of(Failing("host", OSError("no")))
    runner.start()
    wait_for(lambda: runner.status.state == "backoff")
    runner.stop()

    assert runner.join(1)
    assert runner.status.state == "stopped"


def test_trouble_of_the_machine_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "FIRST_BACKOFF_S", 20.0)
    monkeypatch.setattr(runner_module, "LONGEST_BACKOFF_S", 20.0)
    runner = runner_of(Failing("otlp", OSError("cannot listen on 127.0.0.1:4317")))
    runner.start()
    wait_for(lambda: runner.status.state == "backoff")
    runner.stop()

    assert runner.join(1)
    assert runner.status.error == "cannot listen on 127.0.0.1:4317"
    assert "cannot listen on 127.0.0.1:4317" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_same_trouble_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = Failing("otlp", OSError("cannot listen on 127.0.0.1:4317"))
    runner = runner_of(source)
    runner.start()
    wait_for(lambda: runner.status.failures >= 3)
    source.error = OSError("another trouble")
    wait_for(lambda: runner.status.error == "another trouble")
    runner.stop()

    assert runner.join(1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(";")[0] for message in told] == [
        "Source otlp: cannot listen on 127.0.0.1:4317",
        "Source otlp: another trouble",
    ]


@pytest.mark.parametrize("refusal", [PermissionError("no"), UnavailableError("no")])
def test_source_that_is_not_permitted_is_left_alone(refusal: Exception) -> None:
    source = Failing("network", refusal)
    runner = runner_of(source)
    runner.start()
    wait_for(lambda: runner.refused)

    assert runner.join(1)
    assert source.runs == 1
    assert runner.status.error == "no"


def test_source_that_cannot_be_prepared_is_told_of_and_run_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unprepared(Beating):
        def prepare(self) -> None:
            raise OSError("no such device")

    source = Unprepared()
    runner = runner_of(source)
    runner.prepare()
    runner.start()
    wait_for(lambda: source.beats)
    runner.stop()

    assert runner.join(1)
    assert "no such device" in caplog.text


def test_thread_clock_tells_what_each_thread_took() -> None:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            pass

    busy = threading.Thread(target=burn, name="busy")
    idle = threading.Thread(target=stop.wait, name="idle")
    clock = ThreadClock()
    busy.start()
    idle.start()
    try:
        time.sleep(0.2)
        first = clock.spent_s()
        time.sleep(0.2)
        second = clock.spent_s()
    finally:
        stop.set()
        busy.join()
        idle.join()
    clock.spent_s()

    for spent in (first, second):
        assert 0.02 < spent["busy"] <= 0.5
        assert 0 <= spent["idle"] < 0.02
    assert "busy" not in clock.spent_s()


class Emitting(Beating):
    """Emits one sample, and leaves work to a thread of its own."""

    def run(self, emit: Emit, stop: threading.Event) -> None:
        sample = EngineSample(
            instance="h:1",
            source="engine",
            observed_at_ns=1,
            freshness="fresh",
            scrape_ms=1.0,
            restarted=False,
        )
        emit.sample(TELEMETRY_ENGINE, sample)
        helper = threading.Thread(target=stop.wait, name=f"{self.name} helper")
        helper.start()
        helper.join()


def test_cost_of_a_source_is_that_of_the_threads_named_after_it() -> None:
    runner = runner_of(Emitting("engine h:1"))
    runner.start()
    wait_for(lambda: runner.status.counts["samples"] == 1)
    spent = {"engine h:1": 0.1, "engine h:1 helper": 0.2, "engine h:10": 5.0, "engine": 5.0}
    runner.measure(spent, 0.5)
    runner.stop()

    assert runner.join(1)
    assert runner.share.cpu_pct == pytest.approx(60)
    assert runner.share.bytes_s > 100
    assert runner.status.cpu_pct == pytest.approx(60)
    runner.measure(spent, 0.5)
    assert runner.share.bytes_s == 0
