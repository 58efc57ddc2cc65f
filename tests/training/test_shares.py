"""How the batches of an update are dealt out to processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.contract import IGNORED, Batch
from unrolled.training._shares import check_divisible, rows, shares
from unrolled.training.processes import Processes

from .standin import config


def batch(hidden: list[list[bool]], first: int = 0) -> Batch:
    mask = torch.tensor(hidden)
    targets = torch.arange(first, first + mask.numel()).view(mask.shape)
    return Batch(targets + 1000, targets.masked_fill(mask, IGNORED))


def sums(size: int, batches: list[Batch]) -> dict[int, float]:
    """The weight in the loss of the update that each target has, over all processes."""
    found: dict[int, float] = {}
    dealt = [shares(batches, Processes(rank, size))[0] for rank in range(size)]
    assert len({len(own) for own in dealt}) == 1  # or one would wait for the others
    for own in dealt:
        for part, weight in own:
            targets = part.targets[part.targets != IGNORED].tolist()
            assert targets  # a loss over no target may be NaN
            for target in targets:
                found[target] = found.get(target, 0.0) + weight / len(targets)
    return {target: weight for target, weight in found.items() if weight}


masks = st.lists(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=4, max_size=4), min_size=1, max_size=5
)


@given(hidden=masks, size=st.integers(1, 5))
def test_every_target_has_the_same_weight_whatever_is_hidden(hidden, size):
    batches = [batch(x, first=100 * i) for i, x in enumerate(hidden)]
    targets = sorted(t for x in batches for t in x.targets[x.targets != IGNORED].tolist())
    found = sums(size, batches)
    assert sorted(found) == targets
    for weight in found.values():
        assert weight == pytest.approx(1 / len(targets), rel=1e-12)


def test_whole_micro_batches_are_dealt_out_where_that_is_even():
    batches = [batch([[False] * 3] * 4, first=100 * i) for i in range(4)]
    own, whole = shares(batches, Processes(1, 2))
    assert whole
    assert [part is batches[i] for (part, _), i in zip(own, (1, 3), strict=True)] == [True, True]
    own, whole = shares(batches[:3], Processes(1, 2))
    assert not whole
    assert [part.inputs.tolist() for part, _ in own] == [x.inputs[2:].tolist() for x in batches[:3]]


def test_rows_take_their_masks_and_bounds():
    ids = torch.arange(24).view(4, 6)
    padding = ids % 5 == 0
    bounds = torch.tensor([0, 4, 6, 12, 13, 17, 18, 24], dtype=torch.int32)
    part = rows(Batch(ids, ids + 1, padding, bounds), 1, 3)
    assert part.inputs.tolist() == ids[1:3].tolist()
    assert part.targets.tolist() == (ids[1:3] + 1).tolist()
    assert part.key_padding_mask is not None
    assert part.key_padding_mask.tolist() == padding[1:3].tolist()
    assert part.cu_seqlens is not None
    assert part.cu_seqlens.tolist() == [0, 6, 7, 11, 12]
    assert part.cu_seqlens.dtype == torch.int32


def test_settings_that_do_not_divide():
    two = Processes(0, 2)
    check_divisible(config(batch_size=4), two)
    check_divisible(config(batch_size=5, accumulate=2, shard=2), two)
    with pytest.raises(
        ValueError, match="batch_size is 5, but must be a multiple of 2, the number of processes"
    ):
        check_divisible(config(batch_size=5, accumulate=3), two)
    with pytest.raises(ValueError, match="shard is 4, but must divide the number of processes, which is 2"):
        check_divisible(config(shard=4), two)


def test_carried_rows_are_divided_whatever_is_accumulated():
    with pytest.raises(
        ValueError, match=r"batch_size is 5, but must be a multiple of 2, the number of processes$"
    ):
        check_divisible(config(batch_size=5, accumulate=2, carry_state=True), Processes(0, 2))
