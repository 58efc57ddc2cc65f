"""The queue, against a list of what is in it."""

from collections import namedtuple

from hypothesis import given
from hypothesis import strategies as st

from unrolled.serving.waiting import Waiting

Item = namedtuple("Item", ["client", "number"])
ACTIONS = st.lists(st.sampled_from(["a", "b", "c", "take", "remove"]), max_size=40)


@given(ACTIONS)
def test_each_client_has_its_order_and_nobody_is_passed_over_twice(actions):
    queue, held = Waiting(), []
    waited = {}  # times that others were served since a client's last turn
    for number, action in enumerate(actions):
        if action == "take":
            if not held:
                assert queue.first() is None
                continue
            first, item = queue.first(), queue.take()
            assert first == item
            assert item == next(x for x in held if x.client == item.client)
            held.remove(item)
            waited[item.client] = 0
            for client in {x.client for x in held} - {item.client}:
                waited[client] = waited.get(client, 0) + 1
                assert waited[client] <= 2, "there are three clients"
        elif action == "remove":
            gone = queue.remove(lambda item: item.number % 2 == 0)
            assert sorted(gone) == sorted(x for x in held if x.number % 2 == 0)
            held = [x for x in held if x.number % 2]
        else:
            queue.add(item := Item(action, number))
            if action not in {x.client for x in held}:
                waited[action] = 0
            held.append(item)
        assert len(queue) == len(held)
    in_turn = list(queue)
    assert in_turn == [queue.take() for _ in held]


def test_an_answer_that_changes_while_items_are_removed_loses_no_item():
    queue, cancelled = Waiting(), {0}
    for number in range(3):
        queue.add(Item("a", number))

    def wanted(item):
        gone = item.number in cancelled
        cancelled.update((1, item.number))  # as another thread may do meanwhile
        return gone

    removed = queue.remove(wanted)
    assert [item.number for item in removed] == [0, 1]
    assert len(queue) == len(list(queue)) == 1
