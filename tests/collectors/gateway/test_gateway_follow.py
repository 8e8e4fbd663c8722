"""Every line once, whatever happens to the file."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latencyprism.collectors.gateway.follow import Follower


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


def follower(path: Path, counts: Counter[str], clock: Clock, **settings: Any) -> Follower:
    return Follower(str(path), counts, monotonic=clock, **settings)


def lines(follower: Follower, most: int = 1 << 20) -> list[str]:
    return [line.decode() for line in follower.read(most)]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_what_was_there_before_is_left_out(path: Path, counts: Counter[str], clock: Clock) -> None:
    append(path, "old\nbegun")
    log = follower(path, counts, clock)
    before = lines(log)
    append(path, " before\nnew\n")

    assert (before, lines(log)) == ([], ["new"])


def test_or_read_when_asked_for(path: Path, counts: Counter[str], clock: Clock) -> None:
    append(path, "old\nbegun")
    log = follower(path, counts, clock, from_start=True)
    before = lines(log)
    append(path, " before\n\nnew\n")

    assert (before, lines(log)) == (["old"], ["begun before", "new"])


def test_a_file_that_comes_later_is_read_whole(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    log = follower(path, counts, clock)
    before = lines(log)
    append(path, "first\n")

    assert (before, lines(log)) == ([], ["first"])


def test_a_line_waits_for_its_end(path: Path, counts: Counter[str], clock: Clock) -> None:
    path.touch()
    log = follower(path, counts, clock)
    seen = []
    for piece in ("a", "b", "c\nd", "\n"):
        seen.append(lines(log))
        append(path, piece)

    assert [*seen, lines(log)] == [[], [], [], ["abc"], ["d"]]


def test_rotation_by_rename_loses_nothing(path: Path, counts: Counter[str], clock: Clock) -> None:
    path.touch()
    log = follower(path, counts, clock)
    log.open()
    append(path, "1\n")
    first = lines(log)
    append(path, "2\nhalf ")
    path.rename(path.with_suffix(".1"))
    between = lines(log)
    append(path, "a\n")
    append(path.with_suffix(".1"), "line\n3\n")  # the gateway was not told yet
    after = lines(log)
    append(path.with_suffix(".1"), "4\n")
    append(path, "b\n")

    assert [first, between, after, lines(log)] == [
        ["1"],
        ["2"],
        ["half line", "3", "a"],
        ["4", "b"],
    ]
    assert counts["rotated files"] == 1


def test_a_moved_file_is_closed_when_nothing_comes_any_more(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    path.touch()
    log = follower(path, counts, clock, linger_s=10)
    lines(log)
    path.rename(path.with_suffix(".1"))
    path.touch()
    lines(log)
    clock.now_s += 9
    append(path.with_suffix(".1"), "late\n")
    late = lines(log)
    clock.now_s += 11
    lines(log)
    append(path.with_suffix(".1"), "too late\n")

    assert (late, lines(log)) == (["late"], [])


def test_many_rotations_keep_few_files_open(path: Path, counts: Counter[str], clock: Clock) -> None:
    path.touch()
    log = follower(path, counts, clock)
    lines(log)
    for number in range(20):
        append(path, f"{number}\n")
        path.rename(path.with_suffix(f".{number}"))
        path.touch()
        assert lines(log) == [str(number)]

    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(link.readlink().is_relative_to(path.parent) for link in links) == 5
    assert counts["moved files given up"] == 16
    log.close()


def test_truncation_begins_anew(path: Path, counts: Counter[str], clock: Clock) -> None:
    path.touch()
    log = follower(path, counts, clock)
    log.open()
    append(path, "one\ntwo\nhal")
    before = lines(log)
    path.write_text("three\n")

    assert (before, lines(log)) == (["one", "two"], ["three"])
    assert counts["truncated files"] == 1


def test_truncation_is_noticed_even_when_the_file_has_grown_again(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    path.touch()
    log = follower(path, counts, clock)
    log.open()
    append(path, "one\ntwo\n")
    before = lines(log)
    path.write_text("six\nten\nold\n")
    os.utime(path, ns=(1, 1))

    assert (before, lines(log)) == (["one", "two"], ["six", "ten", "old"])
    assert counts["truncated files"] == 1


def test_a_line_that_is_too_long_is_left_out(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    path.touch()
    log = follower(path, counts, clock, max_line_bytes=10)
    log.open()
    append(path, "x" * 11 + "\nshort\n" + "y" * 25)
    first = lines(log, most=8)
    second = lines(log)
    append(path, "y" * 100)
    third = lines(log)
    append(path, "\nnext\n" + "z" * 10 + "\n")

    assert [first, second, third, lines(log)] == [[], ["short"], [], ["next", "z" * 10]]
    assert counts["oversized lines"] == 2


def test_a_burst_is_read_in_pieces(path: Path, counts: Counter[str], clock: Clock) -> None:
    path.touch()
    log = follower(path, counts, clock)
    lines(log)
    append(path, "".join(f"{number:03}\n" for number in range(10)))
    seen: list[list[str]] = []
    while not seen or log.behind:
        seen.append(lines(log, most=16))

    assert seen == [["000", "001", "002", "003"], ["004", "005", "006", "007"], ["008", "009"]]


def test_what_is_hopelessly_behind_is_skipped(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    path.touch()
    log = follower(path, counts, clock, max_behind_bytes=100)
    lines(log)
    append(path, "x\n" * 60)
    skipped = lines(log)
    append(path, "rest\nnew\n")

    assert (skipped, lines(log)) == ([], ["new"])
    assert counts["skipped bytes"] == 120


def test_a_directory_or_a_pipe_is_waited_out(
    path: Path, counts: Counter[str], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    log = follower(path, counts, clock)
    empty = [lines(log) for _ in range(3)]
    path.rmdir()
    os.mkfifo(path)
    empty += [lines(log)]
    path.unlink()
    empty += [lines(log)]
    append(path, "back\n")

    assert (empty, lines(log)) == ([[]] * 5, ["back"])
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} cannot be read (not a regular file); waiting for it"
    ]
    assert counts["times a log could not be read"] == 1


def test_a_path_that_never_was_is_told_of_once(
    path: Path, counts: Counter[str], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = follower(path, counts, clock)
    assert [lines(log) for _ in range(3)] == [[]] * 3

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{path} cannot be read (No such file or directory); waiting for it")
    ]
    assert counts["times a log could not be read"] == 1


def test_a_file_that_may_not_be_read_is_waited_out(
    path: Path, counts: Counter[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, "old\n")
    opened = os.open

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    log = follower(path, counts, clock)
    monkeypatch.setattr(os, "open", refuse)
    before = lines(log)
    monkeypatch.setattr(os, "open", opened)
    after = lines(log)
    append(path, "new\n")

    assert (before, after, lines(log)) == ([], [], ["new"])


def test_an_open_file_that_is_gone_is_read_to_its_end(
    path: Path, counts: Counter[str], clock: Clock
) -> None:
    path.touch()
    log = follower(path, counts, clock)
    lines(log)
    append(path, "last\n")
    path.unlink()

    assert lines(log) == ["last"]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.text("ab\n", max_size=8)),
        st.tuples(st.just("rotate"), st.just("")),
        st.tuples(st.just("read"), st.integers(1, 9)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(actions)
def test_any_mix_of_writing_rotating_and_reading_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("logs") / "access.log"
    path.touch()
    log = follower(path, Counter(), Clock())
    lines(log)
    written: list[str] = [""]
    seen: list[str] = []
    moved = 0
    for what, value in actions:
        if what == "write":
            append(path, value)
            written[-1] += value
        elif what == "read":
            seen += lines(log, value)
        elif moved < 4:
            seen += lines(log, 1)  # it has to look at least once between two rotations
            path.rename(path.with_suffix(f".{moved}"))
            path.touch()
            written.append("")
            moved += 1
    for _ in range(200):
        seen += lines(log, 1000)
    log.close()

    expected = [line for text in written for line in text.split("\n")[:-1] if line]
    assert sorted(seen) == sorted(expected)
