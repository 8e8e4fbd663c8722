"""Messages are done with in any order and acknowledged in their own. Pure."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Receipt(Generic[T]):
    """A message that was taken."""

    message: T
    partition: tuple[str, int]
    """Topic and partition it came on."""
    done: bool = False


class InOrder(Generic[T]):
    """Lets the messages of each partition go in the order in which they came.

    The committed offset of a partition tells only up to where all is done; a client that is told
    of a later message before an earlier one can commit beyond it and lose it. Bounded by the
    messages that are not done.
    """

    def __init__(self) -> None:
        self._taken: defaultdict[tuple[str, int], deque[Receipt[T]]] = defaultdict(deque)

    def __len__(self) -> int:
        """Messages that were not let go yet."""
        return sum(len(taken) for taken in self._taken.values())

    def take(self, topic: str, partition: int, message: T) -> Receipt[T]:
        """Note a message; to be called in the order of the partition."""
        receipt = Receipt(message=message, partition=(topic, partition))
        self._taken[receipt.partition].append(receipt)
        return receipt

    def done(self, receipt: Receipt[T]) -> Iterator[T]:
        """Messages of its partition that can go now, in order; none for one that was forgotten."""
        receipt.done = True
        taken = self._taken[receipt.partition]
        while taken and taken[0].done:
            yield taken.popleft().message

    def forget(self) -> None:
        """Let none of the messages go that were taken until now."""
        self._taken.clear()
