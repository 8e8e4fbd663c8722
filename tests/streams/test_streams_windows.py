"""Watermarks, silence, rivals and clocks that jump."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from emulated_engine import INSTANCE, MS, T0, pack, timing
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.windows import Window, Windows

S = 1_000 * MS
WINDOW = 250 * MS


def made(**changes: Any) -> Windows:
    settings: dict[str, Any] = {"settle_ms": 0, "grace_ms": 0} | changes
    return Windows(INSTANCE, StreamsConfig(**settings))


def due(windows: Windows, now_ns: int, *, oldest_ns: int | None = None) -> list[Window]:
    windows.look(now_ns)
    found = []
    while (window := windows.due(now_ns, lambda: oldest_ns)) is not None:
        found.append(window)
    return found


class Tap:
    """One agent that reports on a topic."""

    def __init__(self, windows: Windows, topic: str, agent: str = "tap", boot_ns: int = 1) -> None:
        self.windows, self.topic, self.agent, self.boot_ns = windows, topic, agent, boot_ns
        self.sequence = -1

    def tell(self, watermark_ns: int, now_ns: int | None = None, *, source: str = "") -> str:
        self.sequence += 1
        return self.again(watermark_ns, watermark_ns if now_ns is None else now_ns, source=source)

    def again(self, watermark_ns: int, now_ns: int, *, source: str = "") -> str:
        return self.windows.admit(
            self.topic,
            pack(
                agent=self.agent,
                boot_ns=self.boot_ns,
                sequence=self.sequence,
                watermark_ns=watermark_ns,
                samples=[timing(source=source)] if source else [],
            ),
            now_ns,
        )


def starts_ms(windows: Sequence[Window]) -> list[int]:
    return [(window.start_ns - T0) // MS for window in windows]


def test_windows_close_as_the_watermark_passes_their_end() -> None:
    windows = made()
    tap = Tap(windows, "requests")
    tap.tell(T0 + 10 * MS)
    assert due(windows, T0 + 10 * MS) == []
    tap.tell(T0 + 249 * MS)
    assert due(windows, T0 + 249 * MS) == []
    tap.tell(T0 + 510 * MS)
    found = due(windows, T0 + 510 * MS)
    assert starts_ms(found) == [0, 250]
    assert [window.end_ns - window.start_ns for window in found] == [WINDOW, WINDOW]
    assert {window.closed_ns for window in found} == {T0 + 510 * MS}
    assert windows.closed_until_ns == T0 + 500 * MS


def test_grace_holds_a_window_open() -> None:
    windows = made(grace_ms=60)
    tap = Tap(windows, "requests")
    tap.tell(T0)
    tap.tell(T0 + 300 * MS)
    assert due(windows, T0 + 300 * MS) == []
    tap.tell(T0 + 310 * MS)
    assert starts_ms(due(windows, T0 + 310 * MS)) == [0]


def test_the_slowest_source_holds_the_watermark() -> None:
    windows = made()
    fast, slow = Tap(windows, "requests"), Tap(windows, "engine")
    slow.tell(T0 + 100 * MS)
    fast.tell(T0 + 900 * MS)
    assert due(windows, T0 + 900 * MS) == []
    slow.tell(T0 + 600 * MS, T0 + 950 * MS)
    assert starts_ms(due(windows, T0 + 950 * MS)) == [0, 250]


def test_a_hurry_follows_the_fastest_source() -> None:
    windows = made()
    fast, slow = Tap(windows, "requests"), Tap(windows, "engine")
    slow.tell(T0 + 100 * MS)
    fast.tell(T0 + 300 * MS)
    windows.look(T0 + 300 * MS, hurry=True)
    window = windows.due(T0 + 300 * MS, lambda: None)
    assert window is not None
    assert window.end_ns == T0 + 250 * MS


def test_the_first_window_waits_until_all_sources_have_shown_themselves() -> None:
    windows = made(settle_ms=1_000)
    Tap(windows, "requests").tell(T0 + 600 * MS, T0)
    assert due(windows, T0 + 999 * MS) == []
    windows.note_event(T0 + 20 * MS)
    Tap(windows, "engine").tell(T0 + 600 * MS, T0 + 900 * MS)
    assert starts_ms(due(windows, T0 + 1_000 * MS)) == [0, 250]


def test_a_silent_source_lets_go_and_is_named() -> None:
    windows = made()
    requests, engine = Tap(windows, "requests"), Tap(windows, "engine")
    engine.tell(T0 + 100 * MS)
    for at in range(100, 2_100, 100):
        requests.tell(T0 + at * MS)
        assert due(windows, T0 + at * MS) == []
    requests.tell(T0 + 2_200 * MS)
    found = due(windows, T0 + 2_200 * MS)
    assert starts_ms(found) == list(range(0, 2_000, 250))
    assert {window.silent_sources for window in found} == {("engine:tap",)}
    engine.tell(T0 + 2_300 * MS)
    requests.tell(T0 + 2_300 * MS)
    (window,) = due(windows, T0 + 2_300 * MS)
    assert window.silent_sources == ()


def test_a_source_whose_watermark_stands_still_counts_as_silent() -> None:
    windows = made()
    requests, stuck = Tap(windows, "requests"), Tap(windows, "engine")
    found = []
    for at in range(0, 3_000, 100):
        requests.tell(T0 + at * MS)
        stuck.tell(T0, T0 + at * MS)
        found += due(windows, T0 + at * MS)
    assert len(found) > 8


def test_windows_go_on_for_a_while_when_every_source_is_silent() -> None:
    windows = made(silence_s=3)
    Tap(windows, "requests").tell(T0 + 100 * MS)
    found = []
    for at in range(0, 20_000, 100):
        found += due(windows, T0 + 100 * MS + at * MS)
    assert starts_ms(found) == list(range(0, 5_000, 250))
    assert {window.silent_sources for window in found[4:]} == {("requests:tap",)}


def test_a_replay_in_which_every_source_is_silent_ends_at_the_last_watermark() -> None:
    windows = made(clock="event")
    Tap(windows, "requests").tell(T0 + 10 * MS, now_ns=5)
    Tap(windows, "engine").tell(T0 + 600 * MS, now_ns=5)
    found = []
    for second in range(10):
        found += due(windows, second * S)
    assert starts_ms(found) == [0, 250]


def test_an_instance_silent_for_long_can_be_forgotten() -> None:
    windows = made(forget_after_s=10)
    tap = Tap(windows, "requests")
    assert not windows.forgettable(T0)
    tap.tell(T0)
    assert not windows.forgettable(T0 + 10 * S)
    assert windows.forgettable(T0 + 11 * S)


def test_a_worker_that_was_away_does_not_take_its_absence_for_silence() -> None:
    windows = made()
    tap, other = Tap(windows, "requests"), Tap(windows, "engine")
    for at in (0, 100):
        tap.tell(T0 + at * MS)
        other.tell(T0 + at * MS)
        due(windows, T0 + at * MS)
    tap.tell(T0 + 5_000 * MS)
    assert due(windows, T0 + 5_000 * MS) == []
    other.tell(T0 + 5_000 * MS)
    assert len(due(windows, T0 + 5_010 * MS)) == 20


def test_a_pack_that_comes_again_is_known() -> None:
    windows = made()
    tap = Tap(windows, "requests")
    assert tap.tell(T0 + 100 * MS) == "taken"
    assert tap.again(T0 + 100 * MS, T0 + 200 * MS) == "duplicate"
    assert windows.counters.duplicate_packs == 1


def test_packs_out_of_order_are_taken_and_move_nothing_back() -> None:
    windows = made()
    tap = Tap(windows, "requests")
    tap.sequence = 4
    assert tap.again(T0 + 600 * MS, T0 + 600 * MS) == "taken"
    tap.sequence = 3
    assert tap.again(T0 + 100 * MS, T0 + 600 * MS) == "taken"
    assert starts_ms(due(windows, T0 + 600 * MS)) == [0, 250]


def test_very_old_sequence_numbers_count_as_known() -> None:
    windows = made()
    tap = Tap(windows, "requests")
    for at in range(2_000):
        assert tap.tell(T0 + at * MS) == "taken"
    for sequence in (0, 700, 1_999):
        tap.sequence = sequence
        assert tap.again(T0, T0 + 2_000 * MS) == "duplicate"


def test_of_two_agents_on_a_topic_the_first_is_read(caplog: pytest.LogCaptureFixture) -> None:
    windows = made()
    first, second = Tap(windows, "requests", "a"), Tap(windows, "requests", "b")
    first.tell(T0)
    for at in range(100, 1_000, 100):
        assert first.tell(T0 + at * MS) == "taken"
        assert second.tell(T0 + at * MS) == "rival"
    assert windows.counters.rival_packs == 9
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "comes from two agents, a and b" in caplog.text


def test_an_agent_with_a_better_source_takes_a_topic_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windows = made()
    gateway, network = Tap(windows, "requests", "a"), Tap(windows, "requests", "b")
    assert gateway.tell(T0, source="gateway") == "taken"
    assert network.tell(T0 + 100 * MS, source="network") == "taken"
    assert gateway.tell(T0 + 200 * MS, source="gateway") == "rival"
    assert gateway.tell(T0 + 300 * MS) == "rival"
    assert network.tell(T0 + 400 * MS) == "taken"
    assert gateway.tell(T0 + 2_500 * MS) == "taken"  # the better one is silent
    assert network.tell(T0 + 2_600 * MS) == "taken"
    assert (windows.counters.rival_packs, caplog.text) == (2, "")


def test_the_second_agent_is_read_once_the_first_is_silent() -> None:
    windows = made()
    first, second = Tap(windows, "requests", "a"), Tap(windows, "requests", "b")
    first.tell(T0)
    assert second.tell(T0 + 1_900 * MS) == "rival"
    assert second.tell(T0 + 2_100 * MS) == "taken"
    assert first.tell(T0 + 2_200 * MS) == "rival"


def test_of_two_agents_with_one_id_the_later_started_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windows = made()
    old, new = Tap(windows, "requests", boot_ns=1), Tap(windows, "requests", boot_ns=2)
    assert old.tell(T0) == "taken"
    assert new.tell(T0 + 100 * MS) == "taken"
    for at in range(200, 600, 100):
        assert old.tell(T0 + at * MS) == "old boot"
        assert new.tell(T0 + at * MS) == "taken"
    assert windows.counters.old_boot_packs == 4
    assert caplog.text.count("give each an id of its own") == 1


def test_a_trouble_that_lasts_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    windows = made()
    first, second = Tap(windows, "requests", "a"), Tap(windows, "requests", "b")
    for second_of_time in range(150):
        first.tell(T0 + second_of_time * S)
        second.tell(T0 + second_of_time * S)
    assert len(caplog.records) == 3


def test_a_clock_far_ahead_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    windows = made()
    tap, wrong = Tap(windows, "requests"), Tap(windows, "host", "wrong")
    tap.tell(T0)
    assert wrong.tell(T0 + 3_600 * S, now_ns=T0) == "clock ahead"
    assert windows.counters.clock_ahead_packs == 1
    assert "clock of agent wrong is 3600 s ahead" in caplog.text
    tap.tell(T0 + 300 * MS)
    assert starts_ms(due(windows, T0 + 300 * MS)) == [0]


def test_in_a_replay_no_clock_is_ahead() -> None:
    windows = made(clock="event")
    assert Tap(windows, "requests").tell(T0, now_ns=5) == "taken"


@pytest.mark.parametrize("no_time", [-(1 << 63), -1, 0])
def test_a_time_before_the_epoch_does_not_begin_the_windows(no_time: int) -> None:
    windows = made()
    windows.note_event(no_time)
    Tap(windows, "requests", agent="broken").tell(no_time, T0)
    Tap(windows, "host").tell(T0 + 250 * MS, T0)
    assert starts_ms(due(windows, T0 + 5 * S))[0] == 250


def test_a_small_step_back_reopens_nothing() -> None:
    windows = made()
    tap = Tap(windows, "requests")
    tap.tell(T0)
    tap.tell(T0 + 1_000 * MS)
    assert len(due(windows, T0 + 1_000 * MS)) == 4
    assert tap.tell(T0 + 100 * MS, T0 + 1_100 * MS) == "taken"
    assert due(windows, T0 + 1_100 * MS) == []
    tap.tell(T0 + 1_250 * MS, T0 + 2_250 * MS)
    assert starts_ms(due(windows, T0 + 2_250 * MS)) == [1_000]


def test_a_large_step_back_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    windows = made()
    taps = [Tap(windows, topic) for topic in ("requests", "engine")]
    for tap in taps:
        tap.tell(T0 + 3_600 * S)
    assert due(windows, T0 + 3_600 * S) == []
    now = T0 + 3_601 * S
    assert [tap.tell(T0, now) for tap in taps] == ["taken", "reset"]
    for tap in taps:
        tap.tell(T0 + 300 * MS, now + 300 * MS)
    assert starts_ms(due(windows, now + 300 * MS)) == [0]
    assert windows.counters.resets == 1
    assert "set back by more than 10 s" in caplog.text


def test_one_clock_set_back_among_others_is_left_behind() -> None:
    windows = made()
    good, bad = Tap(windows, "requests", "good"), Tap(windows, "host", "bad")
    for at in (0, 20_000):
        good.tell(T0 + at * MS)
        bad.tell(T0 + at * MS)
        due(windows, T0 + at * MS)
    assert bad.tell(T0 - 60 * S, T0 + 20_100 * MS) == "taken"
    good.tell(T0 + 20_600 * MS)
    assert len(due(windows, T0 + 20_600 * MS)) == 2
    assert windows.counters.resets == 0


def test_a_stretch_without_events_is_skipped() -> None:
    windows = made(clock="event")
    tap = Tap(windows, "requests")
    tap.tell(T0, now_ns=0)
    tap.tell(T0 + 3_600 * S, now_ns=0)
    found = due(windows, 0, oldest_ns=T0 + 3_600 * S - 100 * MS)
    assert starts_ms(found) == [3_599_750]
    assert windows.counters.skipped_windows == 3_599_750 // 250


def test_a_stretch_with_events_is_not_skipped() -> None:
    windows = made(clock="event")
    tap = Tap(windows, "requests")
    tap.tell(T0, now_ns=0)
    tap.tell(T0 + 60 * S, now_ns=0)
    assert len(due(windows, 0, oldest_ns=T0 + 5 * S)) == 240
    assert windows.counters.skipped_windows == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["requests", "engine", "host"]),
            st.sampled_from(["a", "b"]),
            st.integers(1, 2),
            st.integers(0, 8_000),
            st.integers(0, 900),
        ),
        max_size=60,
    )
)
def test_watermarks_never_move_back_and_windows_follow_each_other(
    packs: list[tuple[str, str, int, int, int]],
) -> None:
    windows = made()
    now = T0
    taps: dict[tuple[str, str, int], Tap] = {}
    found: list[Window] = []
    for topic, agent, boot, watermark_ms, pause_ms in packs:
        now += pause_ms * MS
        tap = taps.setdefault((topic, agent, boot), Tap(windows, topic, agent, boot))
        tap.tell(T0 + watermark_ms * MS, now)
        found += due(windows, now)
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(found))
    assert all(a.closed_ns <= b.closed_ns for a, b in itertools.pairwise(found))
    assert all(window.closed_ns >= window.end_ns for window in found)
    assert windows.counters.resets == windows.counters.skipped_windows == 0
