"""The edges of the demo: processes, load, the fault, and the account at the end."""

import asyncio
import json
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from latencyprism.collectors.config import SourceName
from latencyprism.demo.account import account
from latencyprism.demo.story import NS_PER_S, Span, Story
from latencyprism.listen import Listener
from latencyprism.local.broker import HOST, free_port
from latencyprism.schemas.codec import Codec
from latencyprism.schemas.topics import (
    ALERTS,
    CONTROL_ACKS,
    CONTROL_COMMANDS,
    LATENCY_BATCHES,
)
from latencyprism.settings import Settings
from latencyprism.simulator.load import LoadConfig, Outcome, run_load
from latencyprism.simulator.workload import Phase
from latencyprism.stack import READY_TIMEOUT_S, Stack, running_stack

SHOWN = (LATENCY_BATCHES, ALERTS, CONTROL_COMMANDS, CONTROL_ACKS)
MODEL = "demo"
REPLICAS = 2
WARM_S, BURST_S, CALM_S, FAULT_S, AFTER_S = 24.0, 8.0, 6.0, 14.0, 10.0
STEADY = Phase(
    duration_s=1.0, rate_rps=6.0, prompt_scale=0.08, output_scale=0.16, max_prompt_tokens=600
)
BURST = replace(STEADY, duration_s=BURST_S, rate_rps=13.0, prompt_scale=0.16)
SLOWDOWN = 2.0
FAILED = "FAILED: the fault was missed or the burst was called a fault"
SETTLE_S = 2.0
"""After the load the pipe gets this long to tell the end of it."""


def run_demo(settings: Settings, *, report: Path | None, console: Console) -> bool:
    """Run the story and print the account; True if the fault was found and the burst was not
    called one. Blocks for about a minute after set-up.
    """
    folder = settings.data_dir / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    addresses = [f"{HOST}:{free_port()}" for _ in range(REPLICAS)]
    settings = _demo_settings(settings, folder, addresses)
    capture = may_capture()
    if not capture:
        console.print("No CAP_NET_RAW here: the proxy reports request timings, not the packet tap.")
    with running_stack(settings, workers=1, say=console.print) as stack:
        proxy = _start_service(stack, addresses, capture=capture, console=console)
        story = _play(stack, proxy, addresses[-1], console)
    console.print(account(story))
    console.print("Look further in the history (ClickHouse SQL):")
    for name in ("alert_timeline", "where_time_goes", "commands_and_effect"):
        command = f"  {sys.argv[0]} --set data_dir={folder} sql {name}"
        console.print(command, soft_wrap=True, markup=False, highlight=False)
    console.print(
        "PASSED" if story.passed else FAILED, style="bold green" if story.passed else "bold red"
    )
    if report is not None:
        report.write_text(json.dumps(story.report(), indent=1))
        console.print(f"Report: {report}")
    return story.passed


def may_capture() -> bool:
    """Whether this process may open a packet socket."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except (OSError, AttributeError):
        return False
    return True


def _demo_settings(settings: Settings, folder: Path, addresses: Sequence[str]) -> Settings:
    streams, router = settings.streams, settings.router
    sculpting = replace(streams.sculpting, mode="on")
    sources: tuple[SourceName, ...] = ("engine", "host")
    if may_capture():
        sources += ("network",)
    return settings.model_copy(
        update={
            "data_dir": folder,
            "kafka": replace(settings.kafka, partitions=2),
            "store": replace(settings.store, directory=""),
            "streams": replace(streams, sculpting=sculpting),
            "collectors": replace(
                settings.collectors,
                engines=tuple(f"http://{address}" for address in addresses),
                sources=sources,
            ),
            "router": replace(
                router,
                router="demo-proxy",
                targets={address: address for address in addresses},
                proxy=replace(router.proxy, port=0),
            ),
        }
    )


def _start_service(
    stack: Stack, addresses: Sequence[str], *, capture: bool, console: Console
) -> str:
    console.print("starting two simulated replicas, the proxy and the collectors")
    for number, address in enumerate(addresses, 1):
        port = address.rpartition(":")[2]
        command = [
            *(sys.executable, "-m", "latencyprism.simulator.server"),
            *("--port", port, "--seed", str(number), "--model", MODEL),
        ]
        stack.supervisor.program(f"replica-{number}", command)
    for address in addresses:
        _wait_for(f"http://{address}/health")
    timings = () if capture else ("--timings",)
    proxy = stack.supervisor.role("proxy", "proxy", *timings, config=stack.config)
    agent = stack.supervisor.role("collect", "collect", config=stack.config)
    url = proxy.wait_ready(READY_TIMEOUT_S)
    agent.wait_ready(READY_TIMEOUT_S)
    return url


def _play(stack: Stack, proxy: str, faulty: str, console: Console) -> Story:
    """Run the load with its burst and fault while the topics are listened to."""
    phases = [
        replace(STEADY, duration_s=WARM_S),
        BURST,
        replace(STEADY, duration_s=CALM_S + FAULT_S + AFTER_S),
    ]
    start_ns = time.time_ns()

    def at(seconds: float) -> int:
        return start_ns + round(seconds * NS_PER_S)

    burst_end_s, fault_s = WARM_S + BURST_S, WARM_S + BURST_S + CALM_S
    total_s = fault_s + FAULT_S + AFTER_S
    story = Story(
        whole=Span(start_ns=start_ns, end_ns=at(total_s)),
        burst=Span(start_ns=at(WARM_S), end_ns=at(burst_end_s)),
        fault=Span(start_ns=at(fault_s), end_ns=at(fault_s + FAULT_S)),
        faulty=faulty,
    )
    listener = Listener(stack.settings.kafka, SHOWN, Codec())
    load = _Load(proxy, phases)
    load.start()
    fault_on = False
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=total_s)
        while load.is_alive() or time.time_ns() < at(total_s + SETTLE_S):
            for _, record in listener.poll(0.1):
                story.take(record, time.time_ns())
            now_ns = time.time_ns()
            if not fault_on and now_ns >= story.fault.start_ns:
                _inject(faulty)
                fault_on = True
            progress.update(
                task,
                completed=min(total_s, (now_ns - start_ns) / NS_PER_S),
                description=_chapter(story, now_ns),
            )
    listener.close()
    story.outcomes = load.outcomes
    return story


def _chapter(story: Story, now_ns: int) -> str:
    if now_ns < story.burst.start_ns:
        return "learning what is normal"
    if story.burst.holds(now_ns):
        return "burst: twice the requests, longer prompts"
    if now_ns < story.fault.start_ns:
        return "calm"
    if story.fault.holds(now_ns):
        return f"fault: every step of one replica takes {SLOWDOWN:g} times as long"
    return "recovery"


class _Load(threading.Thread):
    """The load in an event loop of its own, so that listening does not disturb its clock."""

    def __init__(self, url: str, phases: Sequence[Phase]) -> None:
        super().__init__(name="load", daemon=True)
        self._config = LoadConfig(url=url, model=MODEL, seed=7, grace_s=5.0)
        self._phases = phases
        self.outcomes: list[Outcome] = []

    def run(self) -> None:
        """Play the phases."""
        self.outcomes = asyncio.run(run_load(self._config, self._phases))


def _inject(instance: str) -> None:
    body = json.dumps({"kind": "slowdown", "value": SLOWDOWN, "duration_s": FAULT_S}).encode()
    request = urllib.request.Request(
        f"http://{instance}/simulator/fault",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=5).close()  # noqa: S310


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()  # noqa: S310
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
