import pytest
import torch

from unrolled.ops.replay import Replay, chosen

CPU = torch.device("cpu")


def test_again_draws_what_the_first_run_drew_and_leaves_the_generator_alone():
    replay = Replay(CPU)
    first = replay.first(lambda: torch.rand(3))
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(replay.again(torch.rand, 3), first)
    assert torch.equal(replay.again(torch.rand, 3), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_draws_nothing_keeps_nothing():
    replay = Replay(CPU)
    replay.first(lambda x: 2 * x, torch.ones(3))
    assert replay._random is None
    assert replay._choices == []


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(256, torch.uint8), (257, torch.int16), (2**15 + 1, torch.int32), (2**31 + 1, torch.int64)],
)
def test_choices_are_kept_in_few_bytes(n, dtype):
    replay = Replay(CPU)
    choice = torch.tensor([0, n - 1])
    assert torch.equal(replay.first(lambda: chosen(lambda: choice, n)), choice)
    assert replay._choices[0].dtype == dtype
    found = replay.again(lambda: chosen(lambda: choice + 1, n))
    assert torch.equal(found, choice)
    assert found.dtype == torch.long


def test_choices_come_in_their_order_and_every_time():
    replay = Replay(CPU)

    def run(x):
        return torch.stack([chosen((x + i).round().long, 10) for i in range(3)])

    expected = replay.first(run, torch.tensor([0.49]))
    assert expected.flatten().tolist() == [0, 1, 2]
    for _ in range(2):
        assert torch.equal(replay.again(run, torch.tensor([0.51])), expected)


def test_one_run_inside_another_has_its_own_choices():
    outer, inner = Replay(CPU), Replay(CPU)

    def run(x):
        before = chosen(lambda: x, 10)
        within = inner.first(lambda: chosen(lambda: x + 1, 10))
        return torch.stack([before, within, chosen(lambda: x + 2, 10)])

    outer.first(run, torch.tensor(1))
    assert [len(replay._choices) for replay in (outer, inner)] == [2, 1]


def test_outside_of_any_run_a_choice_is_made():
    replay = Replay(CPU)
    with pytest.raises(ZeroDivisionError):
        replay.first(lambda: chosen(lambda: torch.tensor(1 // 0), 2))
    assert int(chosen(lambda: torch.tensor(1), 2)) == 1
    assert replay._choices == []


def test_again_runs_under_the_autocast_of_then():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replay = Replay(CPU)
        replay.first(torch.mm, x, x)
    assert replay.again(torch.mm, x, x).dtype == torch.bfloat16
    replay = Replay(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert replay.again(torch.mm, x, x).dtype == torch.float32
