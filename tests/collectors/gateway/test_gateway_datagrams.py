"""Log lines as datagrams, on a port and on a path."""

import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from latencyprism.collectors.gateway.datagrams import Datagrams, udp_address


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture(params=["127.0.0.1:0", "[::1]:0", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "log.sock") if request.param == "unix" else str(request.param)


@pytest.fixture
def listener(address: str, counts: Counter[str]) -> Iterator[Datagrams]:
    listener = Datagrams(address, counts, max_line_bytes=512, mode=0o660)
    yield listener
    listener.close()


def sender(address: str, listener: Datagrams) -> socket.socket:
    target = udp_address(address)
    if target is None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.connect(address)
    else:
        made = socket.socket(
            socket.AF_INET6 if ":" in target[0] else socket.AF_INET, socket.SOCK_DGRAM
        )
        made.connect((target[0], listener.port))
    return made


def test_each_datagram_is_a_line(address: str, listener: Datagrams) -> None:
    with sender(address, listener) as log:
        before = list(listener.read(1000))
        for line in (b"one\n", b"", b"two"):
            log.send(line)

    assert (before, list(listener.read(1000))) == ([], [b"one\n", b"two"])
    assert not listener.behind


def test_a_datagram_that_is_too_long_is_counted(
    address: str, listener: Datagrams, counts: Counter[str]
) -> None:
    with sender(address, listener) as log:
        log.send(b"x" * 513)
        log.send(b"y" * 512)

    assert list(listener.read(1000)) == [b"y" * 512]
    assert counts["oversized lines"] == 1


def test_a_burst_is_read_in_pieces(address: str, listener: Datagrams) -> None:
    with sender(address, listener) as log:
        for _ in range(4):
            log.send(b"x" * 100)

    assert (len(list(listener.read(300))), listener.behind) == (2, True)
    assert (len(list(listener.read(3000))), listener.behind) == (2, False)


def test_what_the_kernel_dropped_is_counted(counts: Counter[str]) -> None:
    listener = Datagrams("127.0.0.1:0", counts, max_line_bytes=512, mode=0)
    listener._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with sender("127.0.0.1:0", listener) as log:
        for _ in range(50):
            log.send(b"x" * 500)
        received = len(list(listener.read(1 << 20)))
        log.send(b"y")
        received += len(list(listener.read(1 << 20)))
    listener.close()

    assert received < 51
    assert received + counts["lost datagrams"] == 51


def test_the_path_is_made_and_removed(tmp_path: Path, counts: Counter[str]) -> None:
    path = tmp_path / "log.sock"
    listener = Datagrams(str(path), counts, max_line_bytes=512, mode=0o622)
    mode = path.stat().st_mode
    listener.close()

    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o622)
    assert not path.exists()


def test_a_path_that_a_crash_left_is_taken_over(tmp_path: Path, counts: Counter[str]) -> None:
    path = tmp_path / "log.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(path))
    left.close()

    Datagrams(str(path), counts, max_line_bytes=512, mode=0o660).close()


def test_what_others_have_is_not_taken(tmp_path: Path, counts: Counter[str]) -> None:
    path, file = tmp_path / "log.sock", tmp_path / "notes"
    file.write_text("keep")
    listener = Datagrams(str(path), counts, max_line_bytes=512, mode=0o660)
    for taken in (str(path), str(file)):
        with pytest.raises(OSError, match=f"in use: syslog {taken}"):
            Datagrams(taken, counts, max_line_bytes=512, mode=0o660)
    listener.close()

    assert file.read_text() == "keep"


def test_a_port_in_use_is_named(counts: Counter[str]) -> None:
    listener = Datagrams("127.0.0.1:0", counts, max_line_bytes=512, mode=0)
    with pytest.raises(
        OSError,
        match=rf"in use: syslog 127.0.0.1:{listener.port} .*ss -lunp.*collectors\.gateway\.syslog",
    ):
        Datagrams(f"127.0.0.1:{listener.port}", counts, max_line_bytes=512, mode=0)
    listener.close()


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, counts: Counter[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=r"log\.sock"):
        Datagrams(str(tmp_path / "log.sock"), counts, max_line_bytes=512, mode=0o660)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "localhost:514",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:99999",
        "::1:514",
        "log.sock",
        "127.0.0.1:514/x",
        "/" + "x" * 107,
    ],
)
def test_addresses_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="syslog"):
        udp_address(wrong)
