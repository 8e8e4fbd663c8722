"""What is asked of an engine: lengths and gaps with the shape of a public trace, in phases."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le

PREFIX_TOKENS = 512
"""Length of a shared prefix; a prompt that has one is longer."""
PREFIX_GROUPS = 4
"""Different shared prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of one kind of load; phases follow one another."""

    duration_s: Annotated[float, Gt(0)]
    mode: Literal["open", "closed", "burst"] = "open"
    """``open``: arrivals whatever the answers; ``closed``: ``concurrency`` callers, each asking
    again once answered; ``burst``: ``requests`` at once, at the beginning."""
    rate_rps: Annotated[float, Gt(0)] = 1.0
    concurrency: Annotated[int, Ge(1)] = 1
    requests: Annotated[int, Ge(1)] = 1
    think_s: Annotated[float, Ge(0)] = 0.0
    """Mean pause of a caller between answer and next request; exponentially distributed."""
    prompt_scale: Annotated[float, Gt(0)] = 1.0
    """Factor on the trace's prompt lengths (mean 1,171 tokens)."""
    output_scale: Annotated[float, Gt(0)] = 1.0
    """Factor on the trace's answer lengths (mean 257 tokens)."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 8192
    max_output_tokens: Annotated[int, Ge(1)] = 1024
    shared_share: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the requests whose prompt begins with one of the shared prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request before anybody sent it."""

    prompt_tokens: int
    output_tokens: int
    prefix: int | None
    """Group of the shared prefix its first :data:`PREFIX_TOKENS` tokens are; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requests of a trace in the order of their arrival."""

    gap: npt.NDArray[np.float64]
    """Time since the request before, in units of the mean gap."""
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]


@lru_cache(maxsize=1)
def azure_conversation() -> Shape:
    """The shape of the shipped cut of Azure's conversation trace; see data/README.md."""
    text = files("latencyprism.simulator").joinpath("data/azure_conversation.csv").read_text()
    rows = np.loadtxt(text.splitlines(), delimiter=",", skiprows=1, dtype=np.int64)
    gaps = np.diff(rows[:, 0]).astype(np.float64)
    return Shape(
        gap=np.concatenate((gaps, gaps[-1:])) / gaps.mean(),
        prompt_tokens=rows[:, 1],
        output_tokens=rows[:, 2],
    )


class Draw:
    """Draws requests by walking through a trace from a random place; endless, seeded."""

    def __init__(self, rng: np.random.Generator, shape: Shape | None = None) -> None:
        self._rng = rng
        self._shape = shape or azure_conversation()
        self._row = int(rng.integers(len(self._shape.gap)))

    def ask(self, phase: Phase) -> Ask:
        """Lengths of the next request."""
        shape = self._shape
        self._row = (self._row + 1) % len(shape.gap)
        prompt = round(float(shape.prompt_tokens[self._row]) * phase.prompt_scale)
        output = round(float(shape.output_tokens[self._row]) * phase.output_scale)
        prefix = None
        if self._rng.random() < phase.shared_share:
            prefix = int(self._rng.integers(PREFIX_GROUPS))
            prompt = max(prompt, PREFIX_TOKENS + 1)
        return Ask(
            prompt_tokens=min(max(prompt, 1), phase.max_prompt_tokens),
            output_tokens=min(max(output, 1), phase.max_output_tokens),
            prefix=prefix,
        )

    def gap_s(self, phase: Phase) -> float:
        """Time until the next arrival of an open phase: the trace's own rhythm at its rate."""
        return float(self._shape.gap[self._row]) / phase.rate_rps

    def think_s(self, phase: Phase) -> float:
        """Pause of a caller of a closed phase."""
        return float(self._rng.exponential(phase.think_s)) if phase.think_s else 0.0
