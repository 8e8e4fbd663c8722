"""What a stage remembers of its past, bounded, on two time scales."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Stored = npt.NDArray[np.float32]


class Reference:
    """Rows of ``width`` columns: a uniform sample of all the past, and the newest ones.

    The sample (Vitter's algorithm R) is the slow scale: whatever happens in a minute can't push
    the months before it out. The ring of newest rows is the fast one and follows a drift.
    """

    def __init__(
        self, width: int, *, reservoir: int, recent: int, generator: np.random.Generator
    ) -> None:
        self._slow: Stored = np.zeros((reservoir, width), np.float32)
        self._fast: Stored = np.zeros((recent, width), np.float32)
        self._generator = generator
        self.seen = 0

    def __len__(self) -> int:
        return min(self.seen, len(self._slow))

    def learn(self, rows: Floats) -> None:
        """Add rows (n, width)."""
        places = self.seen + np.arange(len(rows))
        self._fast[places % len(self._fast)] = rows
        size = len(self._slow)
        filling = places < size
        self._slow[places[filling]] = rows[filling]
        if not filling.all():
            chosen = self._generator.integers(0, places[~filling] + 1)
            kept = chosen < size
            self._slow[chosen[kept]] = rows[~filling][kept]
        self.seen += len(rows)

    def draw(self, most: int) -> Floats:
        """At most ``most`` rows to fit on, half of them at most from the newest."""
        slow = self._slow[: len(self)]
        if self.seen <= len(self._slow):
            pool = slow
        else:
            share = min(len(self._fast), most // 2)
            fast = self._fast[self._generator.permutation(len(self._fast))[:share]]
            pool = np.concatenate((self._generator.permutation(slow)[: most - share], fast))
        if len(pool) > most:
            pool = self._generator.permutation(pool)[:most]
        return pool.astype(np.float64)

    def arrays(self) -> tuple[Stored, Stored]:
        """The slow and the fast rows, for a snapshot."""
        return self._slow[: len(self)].copy(), self._fast[: min(self.seen, len(self._fast))].copy()

    def restore(self, slow: Stored, fast: Stored, seen: int) -> None:
        """Take up :meth:`arrays`. Raises ValueError when the shapes don't fit."""
        if slow.shape[1:] != self._slow.shape[1:] or fast.shape[1:] != self._fast.shape[1:]:
            raise ValueError(
                f"reference of {slow.shape[1:]} and {fast.shape[1:]} columns: "
                f"want {self._slow.shape[1:]}"
            )
        slow, fast = slow[: len(self._slow)], fast[: len(self._fast)]
        self._slow[: len(slow)] = slow
        self._fast[: len(fast)] = fast
        self.seen = max(seen, len(slow)) if len(slow) == len(self._slow) else len(slow)
