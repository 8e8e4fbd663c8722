import sys

import pytest

from latencyprism.collectors import catalogue
from latencyprism.collectors.catalogue import plan
from latencyprism.collectors.config import CollectorConfig
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.engine.scraper import EngineSource
from latencyprism.collectors.host.source import HostSource
from latencyprism.collectors.source import UnavailableError

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_enabled_sources_are_planned_an_engine_each_and_no_one_twice() -> None:
    config = CollectorConfig(engines=(ONE, TWO, ONE), sources=("engine", "host", "host"))
    entries = plan(config)
    sources = [source for entry in entries for source in entry.make()]

    assert [entry.name for entry in entries] == ["engine 127.0.0.1:1", "engine 127.0.0.1:2", "host"]
    assert [type(source) for source in sources] == [EngineSource, EngineSource, HostSource]
    assert [source.name for source in sources] == [entry.name for entry in entries]


def test_another_engine_touches_no_engine_that_is_there() -> None:
    before = plan(CollectorConfig(engines=(ONE,), sources=("engine", "host")))
    after = plan(CollectorConfig(engines=(TWO, ONE), sources=("host", "engine")))
    same = [(old.name, any(old.same_as(new) for new in after)) for old in before]

    assert same == [("engine 127.0.0.1:1", True), ("host", False)]


def test_settings_of_one_kind_touch_no_other() -> None:
    before = plan(CollectorConfig(engines=(ONE,), sources=("engine", "host")))
    after = plan(
        CollectorConfig(
            engines=(ONE,), sources=("engine", "host"), engine=EngineConfig(interval_s=5)
        )
    )

    assert [old.same_as(new) for old, new in zip(before, after, strict=True)] == [False, True]


def test_wrong_engine_url_is_named() -> None:
    with pytest.raises(ValueError, match="'localhost'"):
        plan(CollectorConfig(engines=("localhost",)))


def test_network_without_the_privilege_is_unavailable_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "may_capture", lambda: False)
    (entry,) = plan(CollectorConfig(engines=(ONE,), sources=("network",)))

    with pytest.raises(UnavailableError, match="CAP_NET_RAW"):
        entry.make()


def test_missing_library_is_unavailable_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "latencyprism.collectors.network.source", None)
    (entry,) = plan(CollectorConfig(sources=("network",)))

    with pytest.raises(UnavailableError, match=r"latencyprism\[collectors\]"):
        entry.make()


@pytest.mark.parametrize("reason", [None, UnavailableError("no driver")])
def test_accelerators_are_watched_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, reason: UnavailableError | None
) -> None:
    from latencyprism.collectors.xpu import source as xpu

    monkeypatch.setattr(xpu, "unavailable", lambda _: reason)
    (entry,) = plan(CollectorConfig(sources=("xpu",)))

    if reason is None:
        assert [type(source) for source in entry.make()] == [xpu.XpuSource]
    else:
        with pytest.raises(UnavailableError, match="no driver"):
            entry.make()
