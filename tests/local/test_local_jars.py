"""Finding Java and fetching Kafka's jars, with programs that stand in for both."""

import multiprocessing
from pathlib import Path

import pytest

from latencyprism.local import jars
from latencyprism.local.broker import UnavailableError

# Writes what Maven would copy, and a line a run into $RUNS.
MVN = """#!/bin/sh
echo run >> "$RUNS"
for word; do case "$word" in -DoutputDirectory=*) out="${word#*=}";; esac; done
mkdir -p "$out" && sleep 0.2 && echo jar > "$out/kafka.jar"
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the path starts with; the cache is empty and JAVA_HOME not set."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LATENCYPRISM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


@pytest.mark.parametrize(
    "told", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "26" 2026-03-17']
)
def test_java_17_and_newer_will_do(tools: Path, told: str) -> None:
    program(tools, "java", f"#!/bin/sh\necho '{told}' >&2\n")
    assert jars.find_java() == str(tools / "java")


@pytest.mark.parametrize("told", ['java version "1.8.0_402"', 'openjdk version "11.0.2"', ""])
def test_older_java_is_refused_in_words(tools: Path, told: str) -> None:
    program(tools, "java", f"#!/bin/sh\necho '{told}' >&2\n")
    with pytest.raises(UnavailableError, match=r"needs Java 17 or newer and .*/java is"):
        jars.find_java()


def test_java_home_goes_before_the_path(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tools, "java", "#!/bin/sh\necho 'openjdk version \"21\"' >&2\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    with pytest.raises(UnavailableError, match=r"no java in JAVA_HOME \(.*none\)"):
        jars.find_java()


def test_jars_are_fetched_once(tools: Path, tmp_path: Path) -> None:
    program(tools, "mvn", MVN)
    first = jars.ensure_jars()
    assert [path.name for path in first.iterdir()] == ["kafka.jar"]
    assert jars.ensure_jars() == first
    assert (tmp_path / "runs").read_text() == "run\n"
    assert first.parent == tmp_path / "cache"
    assert first.name.startswith(f"kafka-{jars.kafka_version()}-")


def test_two_processes_fetch_once(tools: Path, tmp_path: Path) -> None:
    program(tools, "mvn", MVN)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(jars.ensure_jars, [(), ()])
    assert first == second
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_failed_fetch_says_what_maven_said_and_leaves_nothing(
    tools: Path, tmp_path: Path
) -> None:
    program(tools, "mvn", "#!/bin/sh\necho '[ERROR] Unknown host repo: no network'\nexit 1\n")
    with pytest.raises(UnavailableError, match=r"check the network.*Unknown host repo"):
        jars.ensure_jars()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    program(tools, "mvn", MVN)
    assert jars.ensure_jars().is_dir()


def test_a_fetch_that_hangs_is_ended(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tools, "mvn", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(jars, "RESOLVE_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match="did not fetch"):
        jars.ensure_jars()


def test_without_maven_the_words_say_what_to_do(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(UnavailableError, match=r"no mvn to fetch them; install Maven"):
        jars.ensure_jars()


def test_the_pom_of_the_deploy_folder_is_the_one_in_force() -> None:
    shown = Path(__file__).parents[2] / "deploy" / "kafka" / "pom.xml"
    assert shown.resolve() == jars.POM.resolve()
