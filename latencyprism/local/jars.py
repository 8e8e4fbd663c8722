"""Java and the jars of Apache Kafka, resolved once with Maven into a cache folder."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

from latencyprism.local.broker import UnavailableError

POM = Path(__file__).with_name("pom.xml")
JAVA_MAJOR = 17
RESOLVE_TIMEOUT_S = 300.0


def kafka_version() -> str:
    """Version of Apache Kafka that the pom pins."""
    version = ET.parse(POM).findtext(".//{*}kafka.version")  # noqa: S314 a file of ours
    assert version is not None
    return version


def cache_dir() -> Path:
    """Where downloads are kept: ``LATENCYPRISM_CACHE``, else by the XDG convention."""
    if chosen := os.environ.get("LATENCYPRISM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latencyprism"


def find_java() -> str:
    """Path of a Java of at least version 17, from ``JAVA_HOME`` or the path.

    Raises :class:`UnavailableError` in words.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if java is None:
        where = f"JAVA_HOME ({home})" if home else "the path"
        raise UnavailableError(
            f"Apache Kafka needs Java {JAVA_MAJOR} or newer and there is no java in {where}; "
            f"install it (Debian: apt-get install openjdk-{JAVA_MAJOR}-jre-headless maven)"
        )
    found = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', found)
    if version is None or int(version[1]) < JAVA_MAJOR:
        told = found.splitlines()[0] if found else "nothing"
        raise UnavailableError(
            f"Apache Kafka needs Java {JAVA_MAJOR} or newer and {java} is {told}; "
            "install a newer one or point JAVA_HOME at it"
        )
    return java


def jars_dir() -> Path:
    """Folder of Kafka's jars; it is there whole or not at all, and changes with the pom."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:8]
    return cache_dir() / f"kafka-{kafka_version()}-{digest}"


def ensure_jars() -> Path:
    """Folder with Kafka's jars; Maven fetches them the first time, which takes up to minutes.

    Safe against a second process that does the same: one works, the other waits for it. Raises
    :class:`UnavailableError` in words.
    """
    final = jars_dir()
    if final.is_dir():
        return final
    mvn = shutil.which("mvn")
    if mvn is None:
        raise UnavailableError(
            f"Apache Kafka's jars are not in {final} yet and there is no mvn to fetch them; "
            "install Maven (Debian: apt-get install maven), or copy that folder from another "
            "machine"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f"{final.name}.lock")):
        if not final.is_dir():
            _resolve(mvn, final)
    return final


def _resolve(mvn: str, final: Path) -> None:
    with tempfile.TemporaryDirectory(dir=final.parent, prefix="resolving-") as scratch:
        jars = Path(scratch) / "jars"
        command = [
            mvn,
            *("-q", "-B", "-f", str(POM), "dependency:copy-dependencies"),
            *(f"-DoutputDirectory={jars}", "-DincludeScope=runtime"),
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=RESOLVE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as e:
            raise UnavailableError(
                f"Maven did not fetch Apache Kafka {kafka_version()} within "
                f"{RESOLVE_TIMEOUT_S:.0f} s; check the network and try again"
            ) from e
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "[ERROR]" in line]
            told = errors[0].partition("[ERROR]")[2].strip() if errors else done.stderr.strip()
            raise UnavailableError(
                f"Maven could not fetch Apache Kafka {kafka_version()}; check the network, or the "
                f"mirrors and proxies in ~/.m2/settings.xml. It says: {told}"
            )
        jars.rename(final)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with its holder, so no stale lock is left
        yield
