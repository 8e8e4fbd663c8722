"""The sink on a disk that is really full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sinks_support import T0, Clock, memory_sink, pack

from latencyprism.schemas import topics
from latencyprism.schemas.codec import Codec
from latencyprism.schemas.records import StepBatch
from latencyprism.sinks.clickhouse_rows import ClickHouseRows
from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.memory import MemoryBroker
from latencyprism.sinks.migrations.migrate import apply
from latencyprism.sinks.process import StoreProcess

pytestmark = [pytest.mark.clickhouse, pytest.mark.root]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB; skips where it may not be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65_536) == 65_536:
                continue
        except OSError:
            return


def test_rows_wait_for_room_and_none_is_lost(small_disk: Path) -> None:
    store = StoreProcess(small_disk / "store")
    config = StoreConfig(directory=str(store.directory))
    broker, clock, codec = MemoryBroker(), Clock(), Codec()
    with store:
        client = connect(config)
        apply(client, config)
        rows = ClickHouseRows(config)
        sink, _ = memory_sink(broker, rows, clock)
        fill(small_disk / "ballast")
        samples = [
            StepBatch(instance="a:1", source="log", observed_at_ns=T0 + n, start_ns=(T0,) * 1000)
            for n in range(500)
        ]
        broker.append(topics.TELEMETRY_STEPS, codec.encode(topics.TELEMETRY_STEPS, pack(*samples)))
        sink.step(0)
        assert not sink.finish()
        assert (broker.committed, sink.counts.letters) == ({}, 0)
        (small_disk / "ballast").unlink()
        assert sink.finish()
        assert client.command("SELECT count() FROM step_batches FINAL") == 500
        assert broker.committed == {(topics.TELEMETRY_STEPS.name, 0): 1}
        rows.close()
        client.close()
