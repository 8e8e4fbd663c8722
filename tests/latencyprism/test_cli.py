"""The command line says in words what was wrong, and has the roles of a deployment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from latencyprism import __version__
from latencyprism.cli import app


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "latencyprism", "--set", f"data_dir={cwd}", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "collectors.discovery.enabled=off", "up"), "name at least one server"),
        (("topics",), "topics needs a running Kafka"),
        (("collect",), "collect needs a running Kafka"),
        (("worker",), "worker needs a running Kafka"),
        (("sink",), "sink needs a running Kafka"),
        (("router",), "router needs a running Kafka"),
        (("record", "out"), "record reads a running system"),
        (("score", "nowhere", "nothing"), "nothing is no report"),
        (("replay", "nowhere", "--report", "r.json"), "nowhere"),
        (("import", "nowhere", "out"), "nowhere"),
        (("bench", "nonsense"), "no bench 'nonsense'; there are collect, detect, sink"),
        (("sql", "nonsense"), "there is no query 'nonsense'; there are alert_timeline"),
        (("--set", "kafka.partitions=0", "topics"), "kafka.partitions: '0' is not"),
        (("--config", "missing.toml", "topics"), "there is no such file"),
        (("up", "--engine", "not a url"), "not a url"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = run(*arguments, cwd=tmp_path)

    assert done.returncode == 2
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_the_version_is_told(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout == f"latencyprism {__version__}\n"


def test_settings_hide_secrets(tmp_path: Path) -> None:
    done = run("--set", "kafka.sasl_password=hunter2", "settings", cwd=tmp_path)

    assert json.loads(done.stdout)["kafka"]["sasl_password"] == "***"
    assert "hunter2" not in done.stdout


def test_doctor_and_the_list_of_queries(tmp_path: Path) -> None:
    findings = json.loads(run("doctor", "--json", cwd=tmp_path).stdout)

    assert {"yes", "no", "partly"} >= {finding["state"] for finding in findings}
    assert "packet capture" in {finding["name"] for finding in findings}
    assert "alert_timeline" in run("sql", cwd=tmp_path).stdout


def test_every_role_is_a_command() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]

    assert {"collect", "worker", "sink", "store", "router", "proxy"} <= names


@pytest.mark.clickhouse
def test_sql_on_an_empty_store(tmp_path: Path) -> None:
    done = run("sql", "alert_timeline", "--json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.clickhouse
def test_migrations_have_a_state(tmp_path: Path) -> None:
    before = run("migrate", "--dry-run", cwd=tmp_path)
    after = run("migrate", cwd=tmp_path)

    assert "pending" in before.stdout
    assert "pending" not in after.stdout
    assert "applied" in after.stdout
