"""Commands in, acks out, the router in the state that is in force: the part without Kafka."""

import logging
from collections import Counter

from latencyprism.routers.adapter import Adapter, AdapterError
from latencyprism.routers.lease import NORMAL, Instant, Lease, LeaseBook, ack
from latencyprism.schemas.records import Ack, Command

logger = logging.getLogger(__name__)


class Controller:
    """Keeps a router in step with its :class:`LeaseBook`. Used from one thread.

    What the adapter could not do is tried again at every :meth:`verify`, so that a router that
    was away comes back to the state in force, and no target is left throttled by a lease that has
    ended.
    """

    def __init__(self, book: LeaseBook, adapter: Adapter, *, router: str) -> None:
        self._book = book
        self._adapter = adapter
        self._router = router
        self._pending: set[str] = set(book.targets)
        """Targets whose state on the router is not known to be the one in force. At first all:
        an earlier run may have left anything behind."""
        self._effective: dict[str, tuple[str, int]] = {}
        """Newest lease of each target that took effect: its command and when, wall time."""
        self._last_error: str | None = None
        self.counts: Counter[str] = Counter()
        """Commands by outcome, adapter failures and corrections, since the start."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases in force."""
        return self._book.leases

    def handle(self, command: Command, now: Instant) -> Ack | None:
        """Put one command into effect; None when it is not for this router."""
        decision = self._book.offer(command, now)
        self.counts[decision.outcome] += 1
        if decision.effect is None:
            return None
        effect, detail = decision.effect, decision.detail
        if effect == "applied" and not command.dry_run:
            try:
                detail = f"{detail}: {self._apply(command.target)}"
            except AdapterError as error:
                # Fail open: a lease that is not in effect must not be believed to be.
                self._book.revoke(command.target)
                self._pending.add(command.target)
                effect, detail = "refused", str(error)
        elif effect == "expired":
            self._pending.add(command.target)
        logger.info("%s of %s: %s, %s", command.action, command.target, effect, detail)
        at_ns = self._since(command, now) if effect == "applied" else now.wall_ns
        return ack(command, router=self._router, effect=effect, detail=detail, at_ns=at_ns)

    def _since(self, command: Command, now: Instant) -> int:
        """When the lease first took effect, which its renewals do not change."""
        known, at_ns = self._effective.get(command.target, ("", 0))
        if known != command.command_id:
            at_ns = now.wall_ns
            self._effective[command.target] = (command.command_id, at_ns)
        return at_ns

    def tick(self, now: Instant) -> list[Ack]:
        """End leases that ran out and answer for them.

        To be called several times a second; cheap when nothing is to be done.
        """
        ended = self._book.expire(now)
        for lease in ended:
            self._effective.pop(lease.command.target, None)
            self._try(lease.command.target)
        return [
            ack(
                lease.command,
                router=self._router,
                effect="expired",
                detail="the lease ended; "
                + (
                    "the router could not be told yet and is retried"
                    if lease.command.target in self._pending
                    else "the target is back to normal"
                ),
                at_ns=now.wall_ns,
            )
            for lease in ended
        ]

    def verify(self) -> None:
        """Read the router's state back and put right what drifted, such as after its restart."""
        wanted = {target: self._book.state(target) for target in self._book.targets}
        try:
            drifted = self._adapter.drifted(wanted)
        except AdapterError as error:
            self._complain(error)
            # It may come back with another state than it left with.
            self._pending.update(self._book.targets)
            return
        for target in set(drifted) - self._pending:
            logger.warning("%s is not %s as it should be; putting it right", target, wanted[target])
            self.counts["corrected"] += 1
            self._pending.add(target)
        for target in sorted(self._pending):
            self._try(target)

    def release(self) -> None:
        """Bring every target back to normal: this router stops obeying."""
        for target in sorted(self._book.targets):
            self._book.revoke(target)
            self._try(target)

    def _try(self, target: str) -> None:
        try:
            self._apply(target)
        except AdapterError as error:
            self._pending.add(target)
            self._complain(error)

    def _apply(self, target: str) -> str:
        state = self._book.state(target)
        try:
            detail = (
                self._adapter.restore(target)
                if state == NORMAL
                else self._adapter.apply(target, state)
            )
        except AdapterError:
            self.counts["failed"] += 1
            raise
        self._pending.discard(target)
        self._last_error = None
        return detail

    def _complain(self, error: AdapterError) -> None:
        if str(error) != self._last_error:
            self._last_error = str(error)
            logger.warning("the router is not in the state in force and is retried: %s", error)
