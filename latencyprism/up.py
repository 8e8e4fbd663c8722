"""``latencyprism up``: watch real servers until stopped, with a live view of the verdicts."""

import signal
import threading
import time
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from latencyprism.board import Board
from latencyprism.collectors.address import instance_of
from latencyprism.collectors.doctor import examine
from latencyprism.listen import Listener
from latencyprism.schemas.codec import Codec
from latencyprism.schemas.topics import (
    ALERTS,
    CONTROL_ACKS,
    CONTROL_COMMANDS,
    LATENCY_BATCHES,
)
from latencyprism.settings import Settings
from latencyprism.stack import READY_TIMEOUT_S, Stack, running_stack

REFRESH_S = 0.5
SHOWN = (LATENCY_BATCHES, ALERTS, CONTROL_COMMANDS, CONTROL_ACKS)


def up(
    settings: Settings,
    engines: tuple[str, ...],
    *,
    workers: int,
    duration_s: float | None,
    console: Console,
) -> None:
    """Run the whole pipe on this machine for the engines until Ctrl-C, SIGTERM or the duration.

    Raises ValueError naming an engine's URL that is none, before anything is started.
    """
    for url in engines:
        instance_of(url)
    collectors = replace(settings.collectors, engines=engines or settings.collectors.engines)
    settings = settings.model_copy(update={"collectors": collectors})
    stop = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with running_stack(settings, workers=workers, say=console.print) as stack:
            _say_what_is_missing(settings, console)
            if not collectors.engines:
                console.print("no server is named: watching those found on this host")
            agent = stack.supervisor.role("collect", "collect", config=stack.config)
            agent.wait_ready(READY_TIMEOUT_S)
            _watch(stack, stop, duration_s, console)
            console.print("stopping")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say_what_is_missing(settings: Settings, console: Console) -> None:
    """Tell of enabled sources that this host does not permit, and what is lost without them."""
    for finding in examine():
        wanted = finding.name == "packet capture" and "network" in settings.collectors.sources
        if wanted and finding.state != "yes":
            text = f"{finding.name}: {finding.seen}; without it: {finding.lost}. {finding.advice}"
            console.print(text, style="yellow", markup=False)


def _watch(stack: Stack, stop: threading.Event, duration_s: float | None, console: Console) -> None:
    board = Board()
    listener = Listener(stack.settings.kafka, SHOWN, Codec())
    end = time.monotonic() + duration_s if duration_s is not None else None
    status = f"{stack.broker} · history {stack.history} · Ctrl-C ends"
    revived: list[str] = []
    live = Live(console=console, auto_refresh=False, transient=not console.is_terminal)
    try:
        with live:
            while not stop.is_set() and (end is None or time.monotonic() < end):
                for _, record in listener.poll(REFRESH_S):
                    board.take(record)
                revived += stack.revive()
                restarts = f" · started again: {', '.join(revived[-3:])}" if revived else ""
                live.update(board.render(status + restarts), refresh=console.is_terminal)
        if not console.is_terminal:
            console.print(board.render(status))
    finally:
        listener.close()
