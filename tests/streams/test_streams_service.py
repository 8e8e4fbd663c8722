"""A service from profiles to alerts and commands."""

from test_streams_fleet import T0, profile

from latencyprism.schemas.records import Ack, Alert, Command
from latencyprism.streams.config import SculptingConfig, ServiceConfig
from latencyprism.streams.service import ServicePipeline

SECOND = 10**9


def feed(pipeline: ServicePipeline, window: int, fault: bool = True) -> list[Alert | Command]:
    one = profile(window, "fault" if fault else "normal", "a:1")
    other = profile(window, instance="b:1")
    return [record for each in (other, one) for record in pipeline.add(each, each.closed_at_ns)]


def test_an_alert_comes_with_the_command_that_follows_from_it() -> None:
    alert, command = feed(ServicePipeline("svc"), 0)
    assert isinstance(alert, Alert)
    assert isinstance(command, Command)
    assert command.alert == alert.fingerprint


def test_a_repeated_profile_gives_nothing_again() -> None:
    pipeline = ServicePipeline("svc")
    assert len(feed(pipeline, 0)) == 2
    assert feed(pipeline, 0) == []


def test_ticks_renew_leases_and_resolve_alerts_of_the_silent() -> None:
    pipeline = ServicePipeline("svc")
    _, command = feed(pipeline, 0)
    assert isinstance(command, Command)
    now = profile(0).closed_at_ns
    (renewed,) = pipeline.tick(now + 2 * SECOND)
    assert isinstance(renewed, Command)
    assert (renewed.command_id, renewed.epoch) == (command.command_id, command.epoch)
    (over,) = pipeline.tick(now + 20 * SECOND)
    assert isinstance(over, Alert)
    assert over.state == "resolved"
    assert pipeline.open_alerts() == []


def test_configuration_reaches_both_halves() -> None:
    config = ServiceConfig(sculpting=SculptingConfig(mode="off"))
    records = feed(ServicePipeline("svc", config=config), 0)
    assert [type(record) for record in records] == [Alert]


def test_refusals_are_heard() -> None:
    pipeline = ServicePipeline("svc")
    _, command = feed(pipeline, 0)
    assert isinstance(command, Command)
    pipeline.acknowledge(
        Ack(
            ack_id="1",
            command_id=command.command_id,
            target="a:1",
            epoch=command.epoch,
            router="r",
            effect="refused",
            detail="no such server",
            dry_run=False,
            at_ns=T0,
        )
    )
    assert pipeline.tick(profile(0).closed_at_ns + 2 * SECOND) == []


def test_the_story_of_one_fault_is_the_same_in_every_run() -> None:
    def story() -> list[Alert | Command]:
        pipeline = ServicePipeline("svc")
        return [record for n in range(80) for record in feed(pipeline, n, fault=8 <= n < 20)]

    first = story()
    assert first == story()
    assert [r.state for r in first if isinstance(r, Alert)] == ["firing", "resolved"]
    commands = [record for record in first if isinstance(record, Command)]
    assert commands[0].action == "weight"
    assert commands[-1].action == "restore"
