"""Memory networks: the equations, what they equal, what padding and noise do, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from models import stories
from models.kit import assert_same
from models.stories import V
from unrolled.models.memory_network import MemN2N, MemN2NConfig, embed

D = 6
TYINGS = ["adjacent", "layer_wise"]
ENCODINGS = ["printed", "code", "bag"]


def make(**fields) -> MemN2N:
    torch.manual_seed(0)
    config = MemN2NConfig(**{"vocab_size": V, "d_model": D, "n_hops": 2, "memory_size": 7} | fields)
    model = MemN2N(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from uniform attention
    return model


def story(batch=3):
    return stories.story(batch, sentences=4, words=5)


def weight(encoding, j, J, k):
    return {
        "printed": (1 - j / J) - (k / D) * (1 - 2 * j / J),
        "code": 1 + 4 * (k - (D + 1) / 2) * (j - (J + 1) / 2) / (D * J),
        "bag": 1.0,
    }[encoding]


def plain_embed(words, padding, table, encoding):
    """Sum one sentence word by word, coordinate by coordinate."""
    there = words[~padding]
    total = torch.zeros(D, dtype=torch.float64)
    for j, word in enumerate(there, 1):
        scale = [weight(encoding, j, len(there), k) for k in range(1, D + 1)]
        total = total + torch.tensor(scale, dtype=torch.float64) * table[word]
    return total


def plain(model, inputs, padding):
    """Answer one question, as the equations are written; no noise."""
    config, encoding = model.config, model.config.position_encoding
    there = [i for i in range(len(inputs) - 1) if not padding[i].all()]
    u = plain_embed(inputs[-1], padding[-1], model.B, encoding)
    weights = torch.zeros(config.n_hops, len(inputs) - 1, dtype=torch.float64)
    for hop in range(config.n_hops):
        o = torch.zeros(D, dtype=torch.float64)
        if there:
            m, c = (
                torch.stack([plain_embed(inputs[i], padding[i], tables[hop], encoding) for i in there])
                for tables in (model.A, model.C)
            )
            if config.temporal:
                m = m + torch.stack([model.T_A[hop][n] for n in reversed(range(len(there)))])
                c = c + torch.stack([model.T_C[hop][n] for n in reversed(range(len(there)))])
            scores = m @ u
            p = scores if model.linear else scores.exp() / scores.exp().sum()
            weights[hop, there] = p
            o = p @ c
        u = (u if model.H is None else model.H @ u) + o
    return model.W @ u, weights


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("tying", TYINGS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_is_what_the_equations_say_with_all_gradients(encoding, tying, temporal, linear):
    start = 1 if linear else 0
    model = make(position_encoding=encoding, tying=tying, temporal=temporal, linear_start=start)
    inputs, padding = story()
    expected = [plain(model, *row) for row in zip(inputs, padding, strict=True)]
    expected_logits, expected_weights = map(torch.stack, zip(*expected, strict=True))
    logits = model(inputs, key_padding_mask=padding)
    assert_same(logits, expected_logits, 1e-10)
    assert_same(model.attend(inputs, key_padding_mask=padding), expected_weights, 1e-10)
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(x.square().sum(), parameters) for x in (logits, expected_logits))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-10)


def test_a_linear_start_ends_after_its_batches_also_in_a_run_that_goes_on():
    inputs, padding = story()
    model, softmax = make(linear_start=2, noise=0.0), make(noise=0.0)
    reads = []
    for batch in range(4):
        before = model.eval()(inputs, key_padding_mask=padding)
        torch.testing.assert_close(model.train()(inputs, key_padding_mask=padding), before)
        reads.append(torch.equal(before, softmax(inputs, key_padding_mask=padding)))
        if batch == 0:
            resumed = make(linear_start=2, noise=0.0)
            resumed.load_state_dict(model.state_dict())
            model = resumed
    assert reads == [False, False, True, True]


@pytest.mark.parametrize("tying", TYINGS)
def test_one_hop_without_temporal_encoding_is_attention_with_scale_1(tying):
    model = make(n_hops=1, temporal=False, tying=tying)
    inputs, padding = story()
    encoding = model.config.position_encoding
    m, c = embed(inputs[:, :-1], padding[:, :-1], [model.A[0], model.C[0]], encoding)
    (u,) = embed(inputs[:, -1:], padding[:, -1:], [model.B], encoding)
    there = ~padding[:, :-1].all(-1).unsqueeze(1)
    o = F.scaled_dot_product_attention(u, m, c, attn_mask=there, scale=1.0)
    before = u if model.H is None else u @ model.H.T
    assert_same(model(inputs, key_padding_mask=padding), ((before + o) @ model.W.T)[:, 0])


def test_adjacent_tying_shares_storage():
    model = make(n_hops=3)
    for hop in range(2):
        assert model.A[hop + 1] is model.C[hop]
        assert model.T_A[hop + 1] is model.T_C[hop]
    assert model.B is model.A[0]
    assert model.W is model.C[-1]
    assert len(list(model.parameters())) == 8


def test_layer_wise_tying_has_one_of_each():
    model = make(n_hops=3, tying="layer_wise")
    assert model.A[0] is model.A[2]
    assert model.C[0] is model.C[2]
    assert len({id(x) for x in (model.A[0], model.C[0], model.B, model.W)}) == 4
    assert len(list(model.parameters())) == 7


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000), st.sampled_from(TYINGS))
def test_padding_changes_nothing_wherever_it_stands_and_whatever_it_holds(sentences, words, seed, tying):
    model = make(tying=tying)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(V, (2, sentences + 1, words), generator=generator)
    expected, read = model(inputs), model.attend(inputs)
    rows = sorted(torch.randperm(7, generator=generator)[:sentences].tolist())
    columns = sorted(torch.randperm(7, generator=generator)[:words].tolist())
    padded = torch.randint(V, (2, 8, 7), generator=generator)
    padding = torch.ones(2, 8, 7, dtype=torch.bool)
    for row, sentence in zip([*rows, 7], inputs.unbind(1), strict=True):
        padded[:, row, columns] = sentence
        padding[:, row, columns] = False
    torch.testing.assert_close(model(padded, key_padding_mask=padding), expected, atol=1e-11, rtol=1e-11)
    weights = model.attend(padded, key_padding_mask=padding)
    torch.testing.assert_close(weights[:, :, rows], read, atol=1e-11, rtol=1e-11)
    assert weights.sum(-1).allclose(torch.ones(2, 2, dtype=torch.float64))
    assert not weights[:, :, [i for i in range(7) if i not in rows]].any()


def test_a_story_of_padding_is_not_read_and_has_finite_gradients():
    model = make()
    inputs, padding = story()
    padding[1, :-1] = True
    assert not model.attend(inputs, key_padding_mask=padding)[1].any()
    loss = model.loss(inputs, torch.tensor([1, 2, -100]), key_padding_mask=padding)
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, list(model.parameters())))


def test_the_loss_is_the_mean_over_what_is_asked():
    model = make()
    inputs, padding = story()
    targets = torch.tensor([4, -100, 9])
    nll = -model(inputs, key_padding_mask=padding).log_softmax(-1)
    loss = model.loss(inputs, targets, key_padding_mask=padding)
    torch.testing.assert_close(loss, (nll[0, 4] + nll[2, 9]) / 2)


def test_noise_keeps_the_order_spreads_the_ages_and_is_there_in_training_only():
    model = make(memory_size=30, noise=0.5)
    absent = torch.zeros(200, 10, dtype=torch.bool)
    absent[:, 3] = True
    plainly = torch.tensor([8, 7, 6, 6, 5, 4, 3, 2, 1, 0]).expand(200, -1)
    assert torch.equal(model._ages(absent), plainly)
    ages = model.train()._ages(absent)
    present = ages[:, [0, 1, 2, 4, 5, 6, 7, 8, 9]]
    assert (present.diff(dim=1) < 0).all()
    assert ages.min() >= 0
    assert ages.max() == 8 + 5  # 9 sentences and at most ceil(4.5) empty memories
    assert len(ages.unique(dim=0)) > 100
    assert torch.equal(make(memory_size=30, noise=0).train()._ages(absent), plainly)


def test_noise_never_leaves_the_memory():
    model = make(memory_size=10, noise=1.0).train()
    assert model._ages(torch.zeros(5, 10, dtype=torch.bool)).tolist() == [list(range(10))[::-1]] * 5


def test_noise_has_its_own_generator_which_a_saved_run_takes_along(tmp_path):
    model = make(noise=1.0).train()
    inputs, _ = story(batch=20)
    before = torch.get_rng_state()
    model(inputs)
    model.save(tmp_path)
    here = [model(inputs) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    loaded = MemN2N.load(tmp_path).train()
    assert all(torch.equal(loaded(inputs), y) for y in here)
    other = make(noise=1.0, seed=1).train()
    other(inputs)
    assert not torch.equal(other(inputs), here[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_near_to_double(dtype):
    model = make()
    inputs, padding = story()
    expected = model(inputs, key_padding_mask=padding)
    found = model.to(dtype)(inputs, key_padding_mask=padding)
    assert found.dtype == dtype
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    assert (found - expected).abs().max() < bound * expected.abs().max()


def test_wrong_targets_are_refused():
    with pytest.raises(ValueError, match="targets holds values from 11 to 11"):
        make().loss(story()[0], torch.tensor([11, 11, 11]))
