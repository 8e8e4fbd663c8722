"""docker-compose.yml and Dockerfile, read and held against the product that they run.

No Docker engine is needed, and none proves here that the images start.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from latencyprism.cli import app
from latencyprism.local.jars import kafka_version
from latencyprism.settings import load

ROOT = Path(__file__).parents[1]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
ROLES = [name for name, service in SERVICES.items() if "command" in service]
VARIABLE = re.compile(r"\$\{(\w+):[-?]([^}]*)\}")

each_service = pytest.mark.parametrize("name", SERVICES)
each_role = pytest.mark.parametrize("name", ROLES)


def test_the_whole_pipe_is_there() -> None:
    assert set(SERVICES) == {
        "kafka",
        "schema-registry",
        "clickhouse",
        "topics",
        "collectors",
        "worker-1",
        "worker-2",
        "sink",
        "router",
    }


@each_service
def test_images_are_pinned(name: str) -> None:
    _, _, tag = SERVICES[name]["image"].rpartition(":")
    assert re.match(r"\d+\.\d+", tag), SERVICES[name]["image"]


def test_kafka_is_the_version_that_runs_without_docker() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{kafka_version()}"


@each_service
def test_resources_and_logs_are_limited(name: str) -> None:
    limits = SERVICES[name]["deploy"]["resources"]["limits"]
    assert float(limits["cpus"]) > 0
    assert re.fullmatch(r"\d+[MG]", limits["memory"])
    assert SERVICES[name]["logging"]["options"].keys() == {"max-size", "max-file"}


@each_service
def test_what_stays_up_is_checked_and_what_is_waited_for_exists(name: str) -> None:
    service = SERVICES[name]
    if service["restart"] == "unless-stopped":
        assert service["healthcheck"]["test"][0] == "CMD"
    for other, on in service.get("depends_on", {}).items():
        wanted = {"service_healthy": "healthcheck", "service_completed_successfully": "command"}
        assert wanted[on["condition"]] in SERVICES[other], f"{name} waits for {other} in vain"


@each_service
def test_named_volumes_are_declared_and_ports_stay_on_loopback(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source = volume.partition(":")[0]
        assert source.startswith("/") or source in STACK["volumes"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


@each_role
def test_commands_are_ours(name: str) -> None:
    command, *arguments = SERVICES[name]["command"]
    group = typer.main.get_command(app)
    context = typer.Context(group)
    found = group.get_command(context, command)  # type: ignore[attr-defined] # a group
    assert found is not None, command
    found.make_context(command, arguments)


@each_role
def test_settings_are_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in SERVICES[name]["environment"].items():
        if value is not None:
            monkeypatch.setenv(key, VARIABLE.sub(lambda found: found[2], str(value)))
    settings = load()
    host = "127.0.0.1:29092" if SERVICES[name].get("network_mode") == "host" else "kafka:9092"
    assert settings.kafka.bootstrap == host
    if name == "sink":
        assert settings.store.url == "http://clickhouse:8123"
        assert settings.store.password
    if name == "collectors":
        assert settings.collectors.engines == ("http://127.0.0.1:8000",)


@each_role
def test_roles_run_with_the_least_that_they_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert ("user" in service) == (name == "collectors")


def test_credentials_are_not_in_the_file() -> None:
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key:
                assert str(value).startswith("${"), key


def test_the_image_is_built_in_two_stages_and_runs_as_nobody_in_particular() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(stages) == 2
    assert all(re.match(r"python:3\.\d+-slim", stage) for stage in stages)
    assert re.search(r"^USER latencyprism$", text, re.MULTILINE)
    extras = re.search(r'"\.\[([\w,]+)\]"', text)
    assert extras is not None
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(
        re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras[1].split(",")
    )
