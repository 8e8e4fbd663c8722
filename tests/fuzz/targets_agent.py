"""Parsers of the agent's own: socket tables, py-spy's stacks, answers of servers."""

from contextlib import suppress

from latencyprism.collectors.discovery.probe import PATHS, confirms
from latencyprism.collectors.discovery.sockets import answered, listening
from latencyprism.collectors.stacks.stages import fold


def target_socket_table(data: bytes) -> None:
    rows = ["head", *data.decode(errors="replace").splitlines()]
    for listener in listening(rows):
        assert listener.inode >= 0
        assert 0 <= listener.port < 65_536


def target_probe_answer(data: bytes) -> None:
    for path in PATHS:
        confirms(path, data)


def target_stacks(data: bytes) -> None:
    profile = fold(data.decode(errors="replace"), most=3)
    assert len(profile.stacks) <= 3
    assert profile.samples == sum(count for _, count in profile.stages)


def target_netlink_answer(data: bytes) -> None:
    with suppress(OSError):
        found, _ = answered(data)
        assert all(0 <= listener.port < 65_536 for listener in found)
