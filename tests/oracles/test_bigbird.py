"""Agreement of BigBird with transformers, and the smallest examples of where theirs errs.

Opt-in: `make test-oracles` installs it. Theirs draws its table anew for each length, from numpy's global generator;
ours is given that table. In evaluation theirs reads another pattern, and that of padding depends on how much there is.
"""

import pytest
import torch
from agreement import assert_agree
from counted import counted_attention
from oracles.comparing import assert_all_agree

from unrolled.attention.bigbird import Layout, bigbird_attention, bigbird_pattern

np = pytest.importorskip("numpy")
HUGGING_FACE = "transformers 5.24.0, BigBirdBlockSparseAttention"
SEED, BLOCK, RANDOM, HEADS = 3, 4, 2, 2


def hugging_face(length, padded=0):
    """Theirs, its inputs, and a call of it on `x [1,length,8]` whose last tokens are padding."""
    big_bird = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    torch.manual_seed(0)
    config = big_bird.BigBirdConfig(
        hidden_size=8,
        num_attention_heads=HEADS,
        block_size=BLOCK,
        num_random_blocks=RANDOM,
        max_position_embeddings=length,
    )
    theirs = big_bird.BigBirdBlockSparseAttention(config, seed=SEED).double()
    mask = (torch.arange(length) < length - padded).double().unsqueeze(0)
    blocked, band, from_mask, to_mask = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(mask, BLOCK)

    def call(x):
        before = np.random.get_state()
        o, *_ = theirs(x, band, from_mask, to_mask, blocked, blocked)
        np.random.set_state(before)
        return o

    return theirs, call


def table(theirs, length):
    """What theirs draws in training: `[HEADS,N,RANDOM]`, with -1 for the first and the last block."""
    before = np.random.get_state()
    np.random.seed(SEED)
    plan, counts = theirs._get_rand_attn_plan(length, BLOCK, RANDOM)
    drawn = theirs._bigbird_block_rand_mask_with_head(
        from_seq_length=length,
        to_seq_length=length,
        from_block_size=BLOCK,
        to_block_size=BLOCK,
        num_heads=HEADS,
        plan_from_length=plan,
        plan_num_rand_blocks=counts,
    )
    np.random.set_state(before)
    return torch.nn.functional.pad(torch.tensor(np.stack(drawn)).long(), (0, 0, 1, 1), value=-1)


def projected(theirs, x):
    return [p(x).unflatten(-1, (HEADS, -1)) for p in (theirs.query, theirs.key, theirs.value)]


@pytest.mark.parametrize("length", [40, 48, 80])
def test_hugging_face_in_training_with_its_table(length):
    theirs, call = hugging_face(length)
    x = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
    expected = call(x)
    layout, drawn = Layout(BLOCK, random_blocks=RANDOM), table(theirs, length)
    found = bigbird_attention(*projected(theirs, x), layout, drawn.unsqueeze(0)).flatten(2)
    what = f"bigbird, {length // BLOCK} blocks, their table"
    assert_all_agree(found, expected, [x], what, tolerance=1e-10, library=HUGGING_FACE)


def test_theirs_reads_the_first_block_three_times_in_evaluation():
    theirs, call = hugging_face(48)
    theirs.eval()
    x = torch.randn(1, 48, 8, dtype=torch.float64)
    nothing = torch.full((HEADS, 12, RANDOM), -1)
    counts = bigbird_pattern(Layout(BLOCK, random_blocks=RANDOM), nothing, 48).long()
    as_drawn = counted_attention(*projected(theirs, x), counts)[0].flatten(2)
    counts[:, BLOCK:-BLOCK, :BLOCK] += RANDOM
    as_they_do = counted_attention(*projected(theirs, x), counts)[0].flatten(2)
    assert_agree(call(x), as_they_do, "bigbird in evaluation, block 0 counted 1 + r times", tolerance=1e-10)
    assert (call(x) - as_drawn).abs().max() > 1e-3


def test_theirs_depends_on_the_amount_of_padding():
    x = torch.randn(1, 52, 8, dtype=torch.float64)
    _, short = hugging_face(52, padded=1)
    _, long = hugging_face(60, padded=9)  # the same 51 tokens, and two more blocks of padding
    y, z = short(x), long(torch.cat([x, x[:, :8]], 1))
    assert (y[:, :40] - z[:, :40]).abs().max() > 1e-3
