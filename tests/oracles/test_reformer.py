"""Agreement of Reformer with transformers and pytorch-fast-transformers, with the same rotations, and where they err.

Theirs looks back from the first chunk to the last one, of the round before. With one round that is ours; with
several, their chunks cross rounds and keys count as often as they are read. The other library has no chunk before
the first, and takes the mean of the rounds. So both are compared in one round.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree

from unrolled.attention.reformer import ReformerAttention
from unrolled.attention.reformer.hashing import hash_buckets, lsh_attention, unit_keys

HUGGING_FACE = "transformers 5.24.0, LSHSelfAttention"
FAST_TRANSFORMERS = "pytorch-fast-transformers 0.4.0, ReformerAttention"
H, D, CHUNK, SEED = 2, 6, 8, 3


def hugging_face(*, length, num_hashes=1, num_buckets=8, causal=False):
    """Theirs, the inputs, and ours as a function of these."""
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    torch.manual_seed(0)
    config = reformer.ReformerConfig(
        hidden_size=H * D,
        attention_head_size=D,
        num_attention_heads=H,
        num_buckets=num_buckets,
        num_hashes=num_hashes,
        lsh_attn_chunk_length=CHUNK,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=SEED,
        is_decoder=causal,
        axial_pos_embds=False,
        max_position_embeddings=length,
    )
    theirs = reformer.LSHSelfAttention(config, layer_idx=0).double().eval()
    torch.nn.init.normal_(theirs.query_key.weight, std=0.5)
    x = torch.randn(2, length, H * D, dtype=torch.float64, requires_grad=True)

    factors = (num_buckets,) if isinstance(num_buckets, int) else tuple(num_buckets)
    ours = ReformerAttention(
        H * D, H, chunk=CHUNK, n_buckets=list(factors), n_rounds=num_hashes, bias=False
    ).double()
    ours.qkv_proj.weight.data = torch.cat([theirs.query_key.weight, theirs.value.weight]).detach()
    ours.out_proj.weight.data = torch.eye(H * D, dtype=torch.float64)
    torch.manual_seed(SEED)
    rotations = torch.randn(H, D, num_hashes, sum(factors) // 2, dtype=torch.float64)
    ours.rotations.weight.copy_(rotations.flatten(2).mT)
    return theirs, ours, x


def of_theirs(theirs, x, **arguments):
    return theirs(hidden_states=x, **arguments).hidden_states


@pytest.mark.parametrize("num_buckets", [8, [2, 6]])
@pytest.mark.parametrize("length", [16, 24, 64, 256])
def test_one_round(length, num_buckets):
    theirs, ours, x = hugging_face(length=length, num_buckets=num_buckets)
    found, expected = ours(x), of_theirs(theirs, x)
    what = f"one round, {length} tokens, n_buckets {num_buckets}"
    assert_all_agree(found, expected, [x], what, tolerance=1e-10, library=HUGGING_FACE)


@pytest.mark.parametrize("num_hashes", [1, 3])
def test_a_short_input(num_hashes):
    """Theirs takes up to one chunk as a whole, in any number of rounds."""
    theirs, ours, x = hugging_face(length=CHUNK, num_hashes=num_hashes)
    assert_agree(ours(x), of_theirs(theirs, x), f"one chunk, {num_hashes} rounds", library=HUGGING_FACE)


def test_padding():
    """Theirs requires a multiple of the chunk, so a row of 64 keeps 48 tokens; it looks back to a chunk of padding."""
    theirs, ours, x = hugging_face(length=64)
    padding = (torch.arange(64) >= 48).expand(2, 64)
    found = ours(x, key_padding_mask=padding)[:, :48]
    assert_agree(found, ours(x[:, :48]), "ours, without the padding", tolerance=1e-12)
    expected = of_theirs(theirs, x, attention_mask=(~padding).double())[:, :48]
    different = (found - expected).abs().amax((0, 2)) > 1e-9
    assert 0 < int(different.sum()) < 48  # of the first chunk of some head and row only
    alone = of_theirs(theirs, x[:, :48])
    assert (
        float((expected - alone).detach().abs().max()) > 1e-3
    )  # their output depends on the amount of padding


def published(ours, x):
    """The causal form of the paper, which our module does not offer."""
    from unrolled.attention.base import Heads

    heads = Heads(*ours.project(x))
    q, k, buckets = ours._hashed(heads)
    return lsh_attention(q, k, heads.v, buckets, chunk=CHUNK, causal=True).flatten(2)


def test_the_published_causal_form():
    theirs, ours, x = hugging_face(length=64, causal=True)
    found, expected = published(ours, x), of_theirs(theirs, x)
    what = "one round, causal as published"
    assert_all_agree(found, expected, [x], what, tolerance=1e-10, library=HUGGING_FACE)


def test_its_causal_attention_depends_on_the_future():
    theirs, _, x = hugging_face(length=64, causal=True)
    other = x.detach().clone()
    other[:, 40:] = torch.randn(2, 24, H * D, dtype=torch.float64)
    changed = (of_theirs(theirs, other) - of_theirs(theirs, x))[:, :40].abs().amax((0, 2)) > 1e-9
    assert int(changed.sum()) > 10


def test_its_rounds_are_no_softmax_over_their_union():
    """Two chunks: each query reads everything, in one round as in two. Theirs gives two different answers."""
    one, ours_one, x = hugging_face(length=2 * CHUNK)
    two, ours_two, _ = hugging_face(length=2 * CHUNK, num_hashes=2)
    two.load_state_dict(one.state_dict())
    ours_two.qkv_proj.load_state_dict(ours_one.qkv_proj.state_dict())
    assert_agree(ours_two(x), ours_one(x), "ours", tolerance=1e-12)
    difference = (of_theirs(two, x) - of_theirs(one, x)).detach()
    assert float(difference.abs().max()) > 0.01


def test_it_seeds_the_global_generator():
    theirs, _, x = hugging_face(length=64)
    torch.manual_seed(1)
    of_theirs(theirs, x)
    first = torch.rand(())
    torch.manual_seed(2)
    of_theirs(theirs, x)
    assert torch.rand(()) == first


def test_fast_transformers_in_one_round(monkeypatch):
    """Queries beyond the first chunk, which has nothing before it there; logits are divided by sqrt(D).

    Its sort leaves the order within a bucket open, so that it is made a stable one here.
    """
    module = pytest.importorskip("fast_transformers.attention.reformer_attention")
    masking = pytest.importorskip("fast_transformers.masking")
    T, bits = 64, 4
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(2, T, H, D, generator=generator, dtype=torch.float64) for _ in range(2))
    theirs = module.ReformerAttention(chunk_size=CHUNK, bits=bits, rounds=1, masked=True).eval()
    everything, lengths = masking.FullMask(T), masking.LengthMask(torch.tensor([T, T]))
    monkeypatch.setattr(torch, "argsort", lambda x, dim: x.sort(dim=dim, stable=True).indices)
    torch.manual_seed(SEED)
    expected = theirs(q, q, v, everything, lengths, lengths)
    torch.manual_seed(SEED)
    planes = torch.empty(bits, D, dtype=torch.float64).normal_()
    buckets = hash_buckets((q @ planes.mT).unsqueeze(-2), (2 * bits,))
    found = lsh_attention(q, unit_keys(q), v, buckets, chunk=CHUNK, scale=D**-0.5)
    place = buckets[..., 0].argsort(dim=1, stable=True).argsort(dim=1)
    later = place >= CHUNK
    # Its keys have no epsilon in their length, ours 1e-6 in the mean of squares.
    what = "one round, beyond the first chunk"
    assert_agree(found[later], expected[later], what, tolerance=1e-5, library=FAST_TRANSFORMERS)
