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
