"""What judges a closed window, and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from latencyprism.schemas.records import Evidence, StageScore, Verdict
from latencyprism.streams.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on one observation.

    ``stage``, ``observed_ms``, ``expected_ms``, ``score`` and ``threshold`` tell of the stage that
    decided; None when none did. ``features`` is the workload by name as the judge saw it.
    """

    verdict: Verdict
    reason: str
    stage: str | None = None
    observed_ms: float | None = None
    expected_ms: float | None = None
    score: float | None = None
    threshold: float | None = None
    scores: tuple[StageScore, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    features: Mapping[str, float] = field(default_factory=dict)
    version: str
    """Version of the model that judged."""


class Judge(Protocol):
    """Judges the windows of one instance in order; not thread-safe."""

    @property
    def version(self) -> str:
        """Kind and version of the model; changes when a refit is installed."""

    def judge(self, observation: Observation) -> Judgement:
        """Score the observation, then learn from it. Never blocks for a refit."""

    def refit(self) -> Callable[[], Callable[[], None]] | None:
        """Work of the refit that is due, None when none is.

        The work may run in another thread while ``judge`` goes on; it returns the installation,
        which is to be called where ``judge`` is.
        """

    def state(self) -> bytes:
        """All that was learned, for :meth:`restore` of another process."""

    def restore(self, state: bytes) -> None:
        """Take up a state. Raises ValueError when it is damaged or of an unknown format."""
