"""Coverage-guided fuzzing of the parsers with atheris: ``make fuzz`` gives each target its time.

``python tests/fuzz/run.py`` runs all, each in a process of its own; ``python tests/fuzz/run.py NAME
...`` those named. Inputs that reached new code are kept in ``.fuzz/NAME`` and are the start of the
next run. What raised is told, and its input is left in the same folder as ``crash-*``.
"""

import argparse
import subprocess
import sys
from pathlib import Path

SECONDS = 20
RSS_MB = 1024
SLOW_S = 5
CORPUS = Path(".fuzz")


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process; ends it."""
    import atheris

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    with atheris.instrument_imports(include=["latencyprism"]):
        from fuzzing import targets

        target = targets()[name]
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    bounds = (
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={RSS_MB}",
        f"-timeout={SLOW_S}",
        f"-artifact_prefix={corpus}/",
        "-max_len=16384",
        "-print_final_stats=1",
    )
    atheris.Setup([sys.argv[0], *bounds, str(corpus)], target)
    atheris.Fuzz()


def main() -> int:
    """Run the targets one after the other; how many failed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--seconds", type=int, default=SECONDS, help="for each target")
    arguments.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.here:
        fuzz(chosen.names[0], chosen.seconds)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from fuzzing import targets

    known = targets()
    if unknown := set(chosen.names) - set(known):
        arguments.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = []
    for name in chosen.names or known:
        command = [sys.executable, __file__, "--here", "--seconds", str(chosen.seconds), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = [line for line in done.stderr.splitlines() if "exec" in line or "Error" in line]
        told = "ok" if not done.returncode else f"FAILED\n{done.stderr[-4000:]}"
        sys.stdout.write(f"{name}: {last[-1] if last else ''} {told}\n")
        if done.returncode:
            failed.append(name)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
