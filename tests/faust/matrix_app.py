"""The small Faust application of the matrix, run as ``python matrix_app.py worker``.

The environment says which case it plays: ``MATRIX`` holds the JSON of a :class:`Case`. It tells
what it sees as JSON lines on standard output, several times a second.
"""

import json
import os
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latencyprism.schemas.codec import Codec
from latencyprism.schemas.records import Ack
from latencyprism.schemas.topics import CONTROL_ACKS

TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one worker plays; topics are named ``<app>-events`` and so on."""

    app: str
    bootstrap: str
    datadir: str
    partitions: int = 6
    tables: bool = False
    """Whether events are counted in a Faust table, which the product has none of."""
    store: str = "memory://"
    exactly_once: bool = False
    windows: bool = False
    instance: str = ""
    """Static member of the group; empty for a dynamic one."""

    def environment(self) -> dict[str, str]:
        return os.environ | {"MATRIX": json.dumps(asdict(self)), "PYTHONWARNINGS": "ignore"}


# The product's own; test_faust_matrix.py holds them to it, docs/faust-on-kafka-4.md says why.
SETTINGS: dict[str, Any] = {
    "broker_session_timeout": 6.0,
    "broker_heartbeat_interval": 1.0,
    "broker_rebalance_timeout": 15.0,
    "broker_commit_interval": 1.0,
    "consumer_auto_offset_reset": "earliest",
    "stream_wait_empty": False,
    "topic_disable_leader": True,
    "web_enabled": False,
    "worker_redirect_stdouts": False,
}


def tell(**seen: Any) -> None:
    os.write(1, f"{json.dumps(seen)}\n".encode())


def make_app(case: Case) -> Any:
    import faust

    Path(case.datadir).mkdir(parents=True, exist_ok=True)
    app = faust.App(
        case.app,
        broker=f"kafka://{case.bootstrap}",
        store=case.store,
        datadir=case.datadir,
        processing_guarantee="exactly_once" if case.exactly_once else "at_least_once",
        consumer_group_instance_id=case.instance or None,
        topic_partitions=case.partitions,
        topic_replication_factor=1,
        table_cleanup_interval=1.0,
        **SETTINGS,
    )
    codec = Codec()

    def topic(name: str, partitions: int = case.partitions) -> Any:
        return app.topic(
            f"{case.app}-{name}",
            key_type=str,
            key_serializer="raw",
            value_serializer="raw",
            value_type=bytes,
            partitions=partitions,
        )

    out = topic("out")
    counts: Any = Counter()
    if case.tables:
        counts = app.Table(f"{case.app}-counts", default=int, partitions=case.partitions)
    seen: dict[str, Any] = {"n": 0, "taken": [], "headers": {}}
    delays_ms: deque[float] = deque(maxlen=1_000)
    windowed: Any = None
    if case.windows:

        def closed(key: Any, value: int) -> None:
            tell(event="window", key=str(key[0]), value=value)

        windowed = app.Table(
            f"{case.app}-windows",
            default=int,
            partitions=case.partitions,
            on_window_close=closed,
        ).tumbling(2.0, expires=2.0)

    @app.agent(topic("events"))
    async def forward(stream: Any) -> None:
        async for event in stream.events():
            ack: Ack = codec.decode(CONTROL_ACKS, event.value)
            seen["n"] += 1
            delays_ms.append(round((time.time_ns() - ack.at_ns) / 1e6, 1))
            headers = dict(event.headers or {})
            seen["headers"] = {k: v.decode() for k, v in headers.items()} or seen["headers"]
            counts[ack.target] += 1
            if windowed is not None:
                windowed[ack.target] += 1
            await out.send(key=ack.target, value=codec.encode(CONTROL_ACKS, ack))

    @app.agent(topic("batch", 1))
    async def take(stream: Any) -> None:
        async for values in stream.take(100, within=0.5):
            seen["taken"].append(len(values))

    @app.timer(TICK_S)  # type: ignore[untyped-decorator] # as Faust has it
    async def tick() -> None:
        assigned = app.consumer.assignment()
        tell(
            event="tick",
            assigned=sorted(tp.partition for tp in assigned if tp.topic == f"{case.app}-events"),
            counts=dict(counts.items()),
            delays_ms=list(delays_ms),
            **seen,
        )

    return app


if __name__ == "__main__":
    make_app(Case(**json.loads(os.environ["MATRIX"]))).main()
