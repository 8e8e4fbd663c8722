"""Messages go in their own order, whatever the order in which they are done with."""

from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.acks import InOrder

places = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=60)


@given(places, st.randoms(use_true_random=False))
def test_what_goes_is_always_a_beginning_of_its_partition(
    taken: list[tuple[str, int]], chance: object
) -> None:
    order: InOrder[int] = InOrder()
    receipts = [order.take(topic, part, i) for i, (topic, part) in enumerate(taken)]
    waiting = list(receipts)
    chance.shuffle(waiting)  # type: ignore[attr-defined]
    gone: dict[tuple[str, int], list[int]] = {}
    for receipt in waiting:
        gone.setdefault(receipt.partition, []).extend(order.done(receipt))
        expected = [i for i, place in enumerate(taken) if place == receipt.partition]
        sent = gone[receipt.partition]
        assert sent == expected[: len(sent)]
        assert all(receipts[i].done for i in sent)
    assert sorted(i for sent in gone.values() for i in sent) == list(range(len(taken)))
    assert len(order) == 0


def test_a_message_that_was_forgotten_lets_nothing_go() -> None:
    order: InOrder[str] = InOrder()
    old = order.take("t", 0, "old")
    order.forget()
    new = order.take("t", 0, "new")
    assert list(order.done(old)) == []
    assert list(order.done(new)) == ["new"]
