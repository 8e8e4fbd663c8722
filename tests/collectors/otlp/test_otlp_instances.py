"""Whose span it is."""

from typing import Any

import pytest

from latencyprism.collectors.otlp.instances import Instances

ONE, TWO, FAR = "127.0.0.1:8000", "127.0.0.1:8001", "10.9.9.9:8000"
SERVICES = {"chat": TWO, "pod-7": FAR}


def instances(*engines: str, services: Any = SERVICES) -> Instances:
    return Instances([f"http://{engine}" for engine in engines], services)


@pytest.mark.parametrize(
    ("resource", "span", "peer", "expected"),
    [
        ({"service.instance.id": ONE}, {}, None, ONE),
        ({"service.instance.id": FAR, "service.name": "chat"}, {}, None, FAR),
        ({"service.instance.id": "pod-7", "service.name": "chat"}, {}, None, FAR),
        ({"service.instance.id": "8c1f", "service.name": "chat"}, {}, None, TWO),
        ({"server.address": "127.0.0.1", "server.port": 8001}, {}, None, TWO),
        ({"server.address": "127.0.0.1", "server.port": "8001"}, {}, None, TWO),
        ({"server.address": "10.9.9.9", "server.port": 8000}, {"server.port": 1}, None, FAR),
        ({"service.name": "chat"}, {"server.address": "::1", "server.port": 8000}, None, ONE),
        ({"server.address": "h", "server.port": -1}, {}, None, None),
        ({"server.address": 5, "server.port": "x"}, {}, None, None),
        ({}, {}, "10.9.9.9", FAR),
        ({}, {}, "127.0.0.1", None),  # two engines are there
        ({}, {}, "10.1.1.1", None),
        ({}, {}, None, None),
    ],
)
def test_by_what_the_resource_says_then_by_the_sender(
    resource: Any, span: Any, peer: str | None, expected: str | None
) -> None:
    assert instances(ONE, TWO, FAR).find(resource, span, peer) == expected


def test_the_only_engine_here_is_meant_by_a_sender_here() -> None:
    only = instances(ONE, FAR)

    assert [only.find({}, {}, peer) for peer in ("127.0.0.1", "::1", "10.9.9.9")] == [ONE, ONE, FAR]


def test_engines_by_name() -> None:
    named = instances("localhost:8000", services={})

    found = named.find({"server.address": "localhost", "server.port": 8000}, {}, None)
    assert found == "localhost:8000"
