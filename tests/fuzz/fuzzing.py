"""Finds what the parts offer to be fuzzed: every ``target_*`` of a ``targets_*.py`` here.

A target takes any bytes, catches the refusals that its parser documents, and lets all else raise.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

Target = Callable[[bytes], None]

HERE = Path(__file__).resolve().parent


def targets() -> Mapping[str, Target]:
    """Every target by its name without ``target_``; the test's folder must be on the path."""
    found: dict[str, Target] = {}
    for path in sorted(HERE.glob("targets_*.py")):
        module = importlib.import_module(path.stem)
        for name, target in vars(module).items():
            if name.startswith("target_"):
                short = name.removeprefix("target_")
                if short in found:
                    raise ValueError(f"two targets are called {short}; one is in {path.name}")
                found[short] = target
    return found
