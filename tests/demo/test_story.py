"""What the demo says of its records, and when it fails."""

from dataclasses import replace
from typing import Any

import pytest
from fastavro.utils import generate_one
from rich.console import Console

from latencyprism.demo.account import account
from latencyprism.demo.story import NS_PER_S, Span, Story
from latencyprism.schemas import avro
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command, StageTime
from latencyprism.simulator.load import Outcome

START = 1_700_000_000 * NS_PER_S
FAULTY, OTHER = "127.0.0.1:2", "127.0.0.1:1"


def at(seconds: float) -> int:
    return START + round(seconds * NS_PER_S)


def span(start_s: float, end_s: float) -> Span:
    return Span(start_ns=at(start_s), end_ns=at(end_s))


def a(record: type[Any], **values: Any) -> Any:
    base = avro.from_dict(record)(generate_one(avro.parse(avro.record_schema(record))))
    return replace(base, **values)


def alert(fired_s: float, instance: str = FAULTY, **values: Any) -> Alert:
    found: Alert = a(
        Alert, fired_ns=at(fired_s), instance=instance, verdict="fault", state="firing", **values
    )
    return found


def profile(start_s: float, instance: str = FAULTY, **values: Any) -> BatchProfile:
    values = {"verdict": "normal", "requests_started": 1, "requests_finished": 1} | values
    found: BatchProfile = a(
        BatchProfile,
        batch_id=f"{instance}/{start_s}",
        instance=instance,
        window_start_ns=at(start_s),
        window_end_ns=at(start_s + 0.25),
        **values,
    )
    return found


def outcome(sent_s: float, served_by: str) -> Outcome:
    return Outcome(
        number=0,
        phase=0,
        prompt_tokens=10,
        output_tokens=3,
        sent_ns=at(sent_s),
        served_by=served_by,
        chunks_ns=(at(sent_s + 0.1), at(sent_s + 0.11), at(sent_s + 0.12)),
        end_ns=at(sent_s + 0.12),
    )


@pytest.fixture
def story() -> Story:
    found = Story(whole=span(0, 60), burst=span(20, 28), fault=span(34, 48), faulty=FAULTY)
    for record in (
        profile(5, stages=(StageTime(stage="decode", mean_ms=30.0, how="measured"),)),
        profile(21, verdict="workload", reason="longer prompts explain it"),
        alert(34.8, reason="steps take twice as long", causes=()),
        a(Command, command_id="c", target=FAULTY, action="weight", value=0.1, issued_ns=at(34.9)),
        a(Ack, command_id="c", router="proxy", effect="applied", at_ns=at(34.95)),
    ):
        found.take(record, at(35.0))
    found.outcomes = [
        *(outcome(second, FAULTY if second % 2 else OTHER) for second in range(20)),
        *(outcome(36 + n / 10, OTHER) for n in range(9)),
        outcome(37, FAULTY),
    ]
    return found


def test_a_found_fault_passes(story: Story) -> None:
    assert story.passed
    assert story.delay_s() == pytest.approx(1.0)
    assert story.false_alarms() == 0


def test_traffic_moves_away(story: Story) -> None:
    assert story.traffic_share(story.burst) is None
    assert story.traffic_share(span(0, 20)) == pytest.approx(0.5)
    assert story.traffic_share(story.fault) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("extra", "false_alarms"),
    [
        (alert(24.0), 1),
        (alert(24.0, OTHER), 1),
        (alert(30.0), 1),
    ],
)
def test_a_burst_called_fault_fails(story: Story, extra: Alert, false_alarms: int) -> None:
    story.take(extra, extra.fired_ns)

    assert not story.passed
    assert story.false_alarms() == false_alarms


def test_an_alert_on_the_other_replica_is_a_miss(story: Story) -> None:
    story.alerts = [(seen, replace(found, instance=OTHER)) for seen, found in story.alerts]

    assert story.found() is None
    assert not story.passed


def test_updates_do_not_count_as_alarms(story: Story) -> None:
    story.take(replace(alert(24.0), state="updated"), at(24.0))

    assert story.passed


def test_the_report_has_the_figures(story: Story) -> None:
    report = story.report()

    assert report["passed"] is True
    assert report["figures"]["demo.delay_s"] == pytest.approx(1.0)
    assert report["figures"]["demo.ack_delay_ms"] == pytest.approx(50.0)
    assert report["batches"] == {"normal": 1, "workload": 1}
    assert [a["instance"] for a in report["alerts"]] == [FAULTY]


def test_the_account_tells_it(story: Story) -> None:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(account(story))
    told = capture.get()

    for words in (
        "Windows judged 1 workload; no fault alert",
        "longer prompts explain it",
        "1.00 s after it began",
        "steps take twice as long",
        "weight 0.1 on 127.0.0.1:2",
        "proxy: applied after 50 ms",
        "went from 50% to 10%",
    ):
        assert words in told, words


def test_the_account_of_a_miss_says_so() -> None:
    story = Story(whole=span(0, 60), burst=span(20, 28), fault=span(34, 48), faulty=FAULTY)
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(account(story))

    assert "Fault. Not found." in capture.get()
