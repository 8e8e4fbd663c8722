"""The live view shows the newest state and bounded news."""

from typing import Any

from fastavro.utils import generate_one
from rich.console import Console

from latencyprism.board import FORGET_NS, INSTANCES, NEWS, Board
from latencyprism.schemas import avro
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND


def a(record: type[Any], **values: Any) -> Any:
    base = avro.from_dict(record)(generate_one(avro.parse(avro.record_schema(record))))
    fields = {name: getattr(base, name) for name in record.__dataclass_fields__}
    return record(**{**fields, **values})


def profile(instance: str, at_ns: int = NOW, **values: Any) -> BatchProfile:
    found: BatchProfile = a(
        BatchProfile, instance=instance, window_start_ns=at_ns, window_end_ns=at_ns + 1, **values
    )
    return found


def text(board: Board) -> str:
    console = Console(width=220, height=200, no_color=True)
    with console.capture() as capture:
        console.print(board.render("status line"))
    return capture.get()


def test_the_newest_window_wins() -> None:
    board = Board(lambda: NOW)

    board.take(profile("h:1", NOW, verdict="fault", reason="slow steps"))
    board.take(profile("h:1", NOW - SECOND, verdict="normal", reason="older"))

    assert "slow steps" in text(board)
    assert "older" not in text(board)


def test_silence_is_shown() -> None:
    board = Board(lambda: NOW + 9 * SECOND)

    board.take(profile("h:1", NOW, reason="as expected"))

    assert "nothing for 9 s" in text(board)


def test_an_alert_stays_until_resolved() -> None:
    board = Board(lambda: NOW)
    board.take(
        a(Alert, fingerprint="f", state="firing", instance="h:1", reason="stalled", fired_ns=NOW)
    )
    assert text(board).count("stalled") == 2

    board.take(
        a(Alert, fingerprint="f", state="resolved", instance="h:1", stage="decode", updated_ns=NOW)
    )

    assert "resolved h:1 decode" in text(board)
    assert text(board).count("stalled") == 1


def test_a_renewed_command_is_told_once() -> None:
    board = Board(lambda: NOW)
    for issued_ns in (NOW, NOW + SECOND):
        board.take(
            a(
                Command,
                action="weight",
                value=0.25,
                target="h:1",
                issued_ns=issued_ns,
                reason="slow",
                dry_run=True,
            )
        )

    assert text(board).count("weight 0.25 on h:1 (dry run): slow") == 1


def test_a_restore_tells_that_it_is_a_dry_run() -> None:
    board = Board(lambda: NOW)

    board.take(
        a(
            Command,
            action="restore",
            value=None,
            target="h:1",
            issued_ns=NOW,
            reason="the fault is over",
            dry_run=True,
        )
    )

    assert "restore on h:1 (dry run): the fault is over" in text(board)


def test_workload_and_fault_are_told_apart_in_words_and_colour() -> None:
    styles = set()
    for verdict in ("workload", "fault"):
        board = Board(lambda: NOW)
        board.take(
            a(
                Alert,
                fingerprint="f",
                state="firing",
                verdict=verdict,
                instance="h:1",
                stage="decode",
                reason="r",
                fired_ns=NOW,
            )
        )
        assert f"{verdict} on h:1 decode: r" in text(board)
        console = Console(width=220, height=200, force_terminal=True, color_system="standard")
        with console.capture() as capture:
            console.print(board.render(""))
        styles.add("\x1b[1;31m" in capture.get())

    assert styles == {False, True}


def test_refusals_and_expiries_are_told() -> None:
    board = Board(lambda: NOW)

    board.take(
        a(Ack, effect="refused", router="edge", target="h:1", detail="stale epoch", at_ns=NOW)
    )
    board.take(a(Ack, effect="expired", router="edge", target="h:1", at_ns=NOW))

    assert "edge refused a command on h:1: stale epoch" in text(board)
    assert "a lease on h:1 ran out" in text(board)


def test_memory_is_bounded() -> None:
    board = Board(lambda: NOW)
    for number in range(3 * INSTANCES):
        board.take(profile(f"h:{number}", NOW + number))
        board.take(
            a(
                Alert,
                fingerprint=str(number),
                state="resolved",
                instance="x",
                stage=str(number),
                updated_ns=NOW,
            )
        )

    assert text(board).count("h:") == INSTANCES
    assert text(board).count("resolved x") == NEWS


def test_instances_that_left_are_forgotten() -> None:
    board = Board(lambda: NOW)

    board.take(profile("old:1", NOW))
    board.take(profile("new:1", NOW + FORGET_NS + SECOND))

    assert "old:1" not in text(board)
