"""``latencyprism stacks``: what a server's Python processes are doing, now."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from latencyprism.collectors.address import instance_of, port_of
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.stacks.config import StacksConfig
from latencyprism.collectors.stacks.profile import processes_of, take_profiles
from latencyprism.schemas.records import StackProfile

SHOWN = 5
"""Stacks of a process that are shown."""


def profiles(*, engine: str | None, pid: int | None, config: StacksConfig) -> list[StackProfile]:
    """Profiles of one process, or of those of the server at a URL of this machine.

    Blocks while stacks are taken. Raises ValueError unless exactly one of both is given,
    LookupError when no process of the server can be seen or no stack of any could be taken, OSError
    without py-spy.
    """
    if (engine is None) == (pid is None):
        raise ValueError("name what to look into: either --engine URL or --pid NUMBER")
    if engine is not None:
        instance, processes = instance_of(engine), processes_of(port_of(engine))
        if not processes:
            raise LookupError(
                f"no process that listens at {instance} can be seen: it must run on this machine, "
                "and this command as the same user, as root or with CAP_SYS_PTRACE"
            )
    else:
        assert pid is not None
        instance, processes = f"pid {pid}", {pid: "process"}
    try:
        taken = take_profiles(instance, processes, config)
    except UnavailableError as error:
        raise OSError(str(error)) from error
    if not any(profile.samples for profile in taken):
        why = "; ".join(f"process {profile.pid}: {profile.error}" for profile in taken)
        raise LookupError(f"no stacks of {instance} could be taken: {why}")
    return taken


def render(taken: Sequence[StackProfile]) -> RenderableType:
    """The profiles for a person: stages with their share, and the most frequent stacks."""
    parts: list[RenderableType] = []
    for profile in taken:
        seconds = profile.duration_ms / 1000
        parts.append(
            Text(
                f"{profile.role} (process {profile.pid}): {profile.samples} stacks of its threads "
                f"at {profile.rate_hz:g} Hz in {seconds:.1f} s, {profile.failed} failed",
                style="bold",
            )
        )
        if profile.error:
            parts.append(Text(profile.error, style="yellow"))
        table = Table.grid(padding=(0, 2))
        for share in profile.stages:
            table.add_row(f"{share.samples / profile.samples:6.1%}", share.stage)
        parts.append(table)
        parts += [
            Text(f"{count.samples:5} {count.stack}", style="dim", overflow="ellipsis", no_wrap=True)
            for count in profile.stacks[:SHOWN]
        ]
    return Group(*parts)
