"""What a router has to offer so that commands can be put into effect on it."""

from collections.abc import Mapping
from typing import Protocol

from latencyprism.routers.lease import NORMAL, TargetState


class AdapterError(Exception):
    """The router did not do it; the text says what to do about it."""


class Adapter(Protocol):
    """One router; called from one thread, each call may block for a short time."""

    def apply(self, target: str, state: TargetState) -> str:
        """Bring a target into this state, idempotently; says what was done in the router's words.

        Raises :class:`AdapterError`; the state of the target is then unknown.
        """

    def restore(self, target: str) -> str:
        """Bring a target back to normal; like :meth:`apply`."""

    def drifted(self, wanted: Mapping[str, TargetState]) -> tuple[str, ...]:
        """Targets that are no longer in the state last applied, such as after a restart.

        Raises :class:`AdapterError` when the router cannot be asked.
        """


class MemoryAdapter:
    """An adapter without a router: keeps the states it was given. ``failure`` makes it fail."""

    def __init__(self) -> None:
        self.states: dict[str, TargetState] = {}
        self.failure: str | None = None

    def apply(self, target: str, state: TargetState) -> str:
        """Remember the state."""
        if self.failure is not None:
            raise AdapterError(self.failure)
        self.states[target] = state
        return str(state)

    def restore(self, target: str) -> str:
        """Remember that it is normal."""
        return self.apply(target, NORMAL)

    def drifted(self, wanted: Mapping[str, TargetState]) -> tuple[str, ...]:
        """Targets whose remembered state is another."""
        if self.failure is not None:
            raise AdapterError(self.failure)
        return tuple(t for t, state in wanted.items() if self.states.get(t, NORMAL) != state)
