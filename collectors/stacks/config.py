"""Settings of the stacks source."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksConfig:
    """How long, how often and of how many processes call stacks are taken."""

    duration_s: Annotated[int, Ge(1), Le(60)] = 5
    """How long a process is sampled."""
    rate_hz: Annotated[int, Ge(1), Le(20)] = 20
    """Stacks a second."""
    pause_s: Annotated[float, Ge(1)] = 60.0
    """Shortest time between two profiles of one problem when alerts ask for them; within it, at
    most 3 of one instance."""
    processes: Annotated[int, Ge(1), Le(16)] = 4
    """Most processes of a server that are sampled, side by side: its core and workers first."""
    program: str = ""
    """Path of py-spy; empty takes that of the extra latencyprism[stacks], then the search path."""
