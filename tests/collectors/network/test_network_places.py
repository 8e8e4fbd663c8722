"""Where the source takes packets: interfaces that come and go, names that change, short memory."""

import errno
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from network_server import connection, token_server
from network_wire import STREAM_END, request
from test_network_capture import Heard, may_capture, wait_for

from latencyprism.collectors.network import ring as ring_module
from latencyprism.collectors.network import source as source_module
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.ring import Ring
from latencyprism.collectors.network.source import NetworkSource, _Names
from latencyprism.collectors.network.targets import Watch

captures = pytest.mark.skipif(not may_capture(), reason="this process has no CAP_NET_RAW")


class Name:
    """Answers for a host name, in place of the resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: str | None = "10.0.0.6"
        self._real = Watch.of
        monkeypatch.setattr(Watch, "of", self)

    def __call__(self, url: str) -> Watch:
        if "engine" not in url:
            return self._real(url)
        if self.address is None:
            raise OSError(-2, f"engine {url!r}: Name or service not known")
        return Watch(instance="engine:8000", port=8000, addresses=(self.address,))


def refreshed(names: _Names) -> None:
    names.refresh()
    assert names._thread is not None
    names._thread.join(5)


def test_names_are_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Name(monkeypatch)
    monkeypatch.setattr(source_module, "NAMES_S", 0.0)
    names = _Names(["http://engine:8000"], Counter())

    name.address = "10.0.0.7"
    refreshed(names)

    assert [watch.addresses for watch in names.watches] == [("10.0.0.7",)]


def test_a_name_that_is_lost_keeps_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Name(monkeypatch)
    monkeypatch.setattr(source_module, "NAMES_S", 0.0)
    counts: Counter[str] = Counter()
    names = _Names(["http://engine:8000"], counts)

    name.address = None
    refreshed(names)

    assert [watch.addresses for watch in names.watches] == [("10.0.0.6",)]
    assert counts == {"names not resolved": 1}


def test_one_name_that_does_not_resolve_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = Name(monkeypatch)
    monkeypatch.setattr(source_module, "NAMES_S", 0.0)
    name.address = None
    engines = ["http://127.0.0.1:1", "http://engine:8000"]
    names = _Names(engines, Counter())
    assert [watch.instance for watch in names.watches] == ["127.0.0.1:1"]

    name.address = "10.0.0.6"
    refreshed(names)

    assert [watch.instance for watch in names.watches] == ["127.0.0.1:1", "engine:8000"]
    name.address = None
    with pytest.raises(OSError, match="not known"):
        _Names(["http://engine:8000"], Counter())


def test_addresses_are_not_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "NAMES_S", 0.0)
    names = _Names(["http://127.0.0.1:1", "http://[::1]:2"], Counter())

    names.refresh()

    assert names._thread is None


def test_nothing_to_watch_is_refused() -> None:
    with pytest.raises(ValueError, match="no server"):
        NetworkSource([], NetworkConfig()).run(Heard(), threading.Event())


@pytest.mark.root
@captures
def test_short_of_memory_the_ring_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Socket(socket.socket):
        """Has 2 MiB for a ring, and no more."""

        def setsockopt(self, level: int, option: int, value: int | bytes) -> None:  # type: ignore[override]
            if (level, option) == (ring_module.SOL_PACKET, ring_module.PACKET_RX_RING):
                assert isinstance(value, bytes)
                blocks = int.from_bytes(value[4:8], "little")
                if blocks * ring_module.BLOCK_BYTES > most:
                    raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().setsockopt(level, option, value)

    monkeypatch.setattr(socket, "socket", Socket)
    most = 2 << 20
    ring = Ring("lo", [1], ring_mib=8, block_timeout_ms=5)
    assert ring.size_mib == 2
    assert ring.drain(lambda *_: None)
    assert not ring.filling()
    ring.close()
    assert [record.args for record in caplog.records] == [(8,), (4,)]

    most = 1000
    with pytest.raises(OSError, match="allocate"):
        Ring("lo", [1], ring_mib=8, block_timeout_ms=5)


@pytest.mark.root
@captures
async def test_what_was_opened_before_the_start_is_used() -> None:
    async with token_server("127.0.0.1") as (_, port):
        source = NetworkSource([f"http://127.0.0.1:{port}"], NetworkConfig(ring_mib=1))
        source.prepare()
        async with connection(port) as (reader, writer):
            writer.write(request({"tokens": 3, "gap_ms": 1}))
            await reader.readuntil(STREAM_END)
        heard, stop = Heard(), threading.Event()
        thread = threading.Thread(target=source.run, args=(heard, stop))
        thread.start()
        wait_for(lambda: [part.state for part in heard.samples][-1:] == ["complete"])
        stop.set()
        thread.join(5)

    assert source.counts == {"exchanges": 1}  # also afterwards


def link(*arguments: str) -> None:
    subprocess.run(["ip", "link", *arguments], check=True, capture_output=True)


def may_make_links() -> bool:
    if not may_capture() or shutil.which("ip") is None:
        return False
    name = f"lpt{os.getpid() % 10**9}"
    made = subprocess.run(
        ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"],
        capture_output=True,
        check=False,
    )
    if made.returncode == 0:
        link("delete", name)
    return made.returncode == 0


@contextmanager
def interface() -> Iterator[str]:
    """A pair of interfaces that are up; the name of one."""
    name = f"lp{os.getpid() % 10**9}"
    make(name)
    try:
        yield name
    finally:
        link("delete", name)


def make(name: str) -> None:
    link("add", name, "type", "veth", "peer", "name", f"{name}p")
    for end in (name, f"{name}p"):
        link("set", end, "up")


@pytest.mark.root
@pytest.mark.skipif(not may_make_links(), reason="making interfaces needs CAP_NET_ADMIN and ip")
def test_an_interface_that_goes_down_and_one_that_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_module, "PLACES_S", 0.05)
    with interface() as name:
        config = NetworkConfig(interface=name, ring_mib=1)
        source = NetworkSource(["http://127.0.0.1:1"], config)
        heard, stop = Heard(), threading.Event()
        thread = threading.Thread(target=source.run, args=(heard, stop))
        thread.start()
        wait_for(lambda: heard.watermarks)
        link("set", name, "down")
        wait_for(lambda: source.counts.get("interface down"))
        link("set", name, "up")
        now_ns = time.time_ns()
        wait_for(lambda: min(heard.watermarks.values()) > now_ns)
        places = source._places
        assert places is not None
        before = places._own
        link("delete", name)
        make(name)
        wait_for(lambda: places._own is not before)
        now_ns = time.time_ns()
        wait_for(lambda: min(heard.watermarks.values()) > now_ns)
        stop.set()
        thread.join(5)

    assert "went down" in caplog.text
