"""The loss of connectionist temporal classification, and the models that are trained by it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from unrolled.contract import IGNORED
from unrolled.models import BiLSTMTranscriber, Transcriber
from unrolled.models.ctc import Subsampling, ctc_loss
from unrolled.ops.masks import padding_mask

KINDS = ["transcriber", "bilstm_transcriber"]


def said(path, blank):
    """What a path stands for: repeats merged, then blanks removed."""
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != blank]


def probability(p, symbols):
    """Sum over all paths [T] of their probability, for p [T,V+1], where they stand for these symbols."""
    T, n = p.shape
    return sum(
        math.prod(float(p[t, symbol]) for t, symbol in enumerate(path))
        for path in itertools.product(range(n), repeat=T)
        if said(path, n - 1) == symbols
    )


@st.composite
def rows(draw):
    """Frames and targets of one to three rows, each possible."""
    V = draw(st.integers(1, 3))
    T = draw(st.integers(1, 5))
    frames = draw(st.lists(st.integers(1, T), min_size=1, max_size=3))
    targets = []
    for n in frames:
        path = draw(st.lists(st.integers(0, V), min_size=n, max_size=n))  # what it says is possible
        targets.append(said(path, V))
    return V, T, frames, targets, draw(st.integers(0, 1_000))


@settings(max_examples=40)
@given(rows())
def test_the_loss_is_a_sum_over_all_paths(case):
    V, T, frames, targets, seed = case
    logits = torch.randn(len(frames), T, V + 1, generator=torch.Generator().manual_seed(seed)).double()
    U = max(1, *map(len, targets)) if len(targets) > 1 else max(1, len(targets[0]))
    padded = torch.tensor([ids + [IGNORED] * (U - len(ids)) for ids in targets])
    log_probs = logits.log_softmax(-1)
    found = ctc_loss(log_probs, padded, torch.tensor(frames))
    nats = -sum(
        math.log(probability(p[:n].exp(), ids)) for p, n, ids in zip(log_probs, frames, targets, strict=True)
    )
    assert found.item() == pytest.approx(nats / max(1, sum(map(len, targets))), rel=1e-10)


def test_the_gradient_of_the_loss_is_that_of_the_sum_over_all_paths():
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    logits.requires_grad_()
    p = logits.softmax(-1)[0]
    paths = [path for path in itertools.product(range(3), repeat=4) if said(path, 2) == [0, 1]]
    total = sum(math.prod(p[t, symbol] for t, symbol in enumerate(path)) for path in paths)
    (expected,) = torch.autograd.grad(-total.log() / 2, logits)
    loss = ctc_loss(logits.log_softmax(-1), torch.tensor([[0, 1]]), torch.tensor([4]))
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "frames", "message"),
    [
        ([[0, 1, 0]], [2], "row 0 has 2 frames after subsampling, but must have at least 3"),
        ([[1, IGNORED], [0, 0]], [4, 2], "row 1 has 2 frames after subsampling, but must have at least 3"),
        ([[IGNORED, 1]], [4], "targets has ids after -100 in a row, but must have -100 at the end only"),
    ],
)
def test_impossible_targets_are_refused(targets, frames, message):
    log_probs = torch.zeros(len(targets), 4, 3).log_softmax(-1)
    with pytest.raises(ValueError, match=message):
        ctc_loss(log_probs, torch.tensor(targets), torch.tensor(frames))


def test_a_batch_without_targets_has_the_loss_of_nothing_said():
    log_probs = torch.randn(2, 3, 3).log_softmax(-1)
    nothing = torch.full((2, 1), IGNORED)
    found = ctc_loss(log_probs, nothing, torch.tensor([3, 3]))
    torch.testing.assert_close(found, -log_probs[..., 2].sum())


@pytest.mark.parametrize("kind", ["bilstm_transcriber", "transcriber"])
@pytest.mark.parametrize("mask", [None, torch.zeros(0, 9, dtype=torch.bool)])
def test_a_batch_without_rows_has_a_loss_of_0(kind, mask):
    loss = small_model(kind).loss(torch.zeros(0, 9, 6), torch.zeros(0, 2).long(), key_padding_mask=mask)
    loss.backward()
    assert float(loss.detach()) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
def test_autocast_rounds_but_runs(kind, dtype, padded):
    torch.manual_seed(0)
    model = small_model(kind).eval()
    x, padding = torch.randn(2, 40, 6), padding_mask(torch.tensor([40, 17])) if padded else None
    exact = model(x, key_padding_mask=padding)
    with torch.autocast("cpu", dtype):
        rounded = model(x, key_padding_mask=padding)
        model.loss(x, torch.tensor([[0, 1], [2, IGNORED]]), key_padding_mask=padding).backward()
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 21])
def test_four_frames_become_one(length):
    torch.manual_seed(0)
    layer = Subsampling(6, 8).double()
    x = torch.randn(1, length, 6).double()
    alone = layer(x, torch.zeros(1, length, dtype=torch.bool))
    assert alone.shape == (1, -(-length // 4), 8)
    padded = torch.cat([x, torch.full((1, 7, 6), math.nan).double()], 1)
    found = layer(padded, padding_mask(torch.tensor([length]), length + 7))
    torch.testing.assert_close(found[:, : alone.shape[1]], alone, rtol=0, atol=1e-12)
    assert not found[:, alone.shape[1] :].any()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bilstm_transcriber", {}),
        ("transcriber", {}),
        ("transcriber", {"attention": "softmax"}),
        ("transcriber", {"attention": "reformer"}),
        ("transcriber", {"attention": ["window", "linear"]}),
    ],
)
def test_padding_and_company_change_nothing(kind, options):
    torch.manual_seed(0)
    model = small_model(kind, **options).double().eval()
    sounds = [torch.randn(n, 6).double() for n in (30, 9, 1)]
    alone = [model(sound[None])[0] for sound in sounds]
    x = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True, padding_value=math.nan)
    padding = padding_mask(torch.tensor([30, 9, 1]))
    together = model(x, key_padding_mask=padding)
    assert model.frames(x, padding).tolist() == [8, 3, 1]
    for row, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(expected.exp().sum(-1), torch.ones(len(expected)).double())
    targets = torch.tensor([[1, 2, 2], [0, IGNORED, IGNORED], [3, IGNORED, IGNORED]])
    loss = model.loss(x, targets, key_padding_mask=padding)
    parts = [model.loss(s[None], t[None]) for s, t in zip(sounds, targets, strict=True)]
    torch.testing.assert_close(loss, (3 * parts[0] + parts[1] + parts[2]) / 5)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_tones_say(kind):
    torch.manual_seed(0)
    model = small_model(kind, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    targets = torch.tensor([[0, 1, 2], [2, 1, IGNORED], [1, IGNORED, IGNORED]])
    x = torch.zeros(3, 48, 6)
    for row, ids in zip(x, targets, strict=True):
        for place, symbol in enumerate(ids[ids >= 0].tolist()):
            row[16 * place : 16 * place + 12, symbol] = 3.0
    losses = []
    for _ in range(300):
        loss = model.loss(x, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > 2
    assert losses[-1] < 0.1
    said_now = [said(row.tolist(), model.vocab_size) for row in model.eval()(x).argmax(-1)]
    assert said_now == [[0, 1, 2], [2, 1], [1]]


def test_memory_can_be_saved():
    torch.manual_seed(0)
    model = small_model("transcriber", dropout=0.0)
    x, targets = torch.randn(2, 20, 6), torch.tensor([[1, 2], [0, 0]])
    model.loss(x, targets).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing = True
    model.loss(x, targets).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "padding", "message"),
    [
        (
            torch.zeros(2, 8, 5),
            None,
            r"x is torch.float32 of shape \[2, 8, 5\], but must be floating point \[B, T, 6\]",
        ),
        (
            torch.zeros(2, 0, 6),
            None,
            r"shape \[2, 0, 6\], but must be floating point \[B, T, 6\] with T of at least 1",
        ),
        (torch.zeros(2, 8, 6).long(), None, r"x is torch.int64 of shape \[2, 8, 6\], but"),
        (
            torch.zeros(1, 3, 6),
            torch.tensor([[True, False, False]]),
            "key_padding_mask has padding before a frame",
        ),
    ],
)
def test_wrong_inputs_are_named(kind, x, padding, message):
    with pytest.raises(ValueError, match=message):
        small_model(kind)(x, key_padding_mask=padding)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_symbols_are_named(kind):
    with pytest.raises(ValueError, match=r"targets holds values from 7 to 7, but they must be in \[0, 7\)"):
        small_model(kind).loss(torch.zeros(1, 40, 6), torch.tensor([[7]]))
    with pytest.raises(ValueError, match=r"targets has shape \[1\], but must be \[B, U\]"):
        small_model(kind).loss(torch.zeros(1, 40, 6), torch.tensor([1]))


def test_kinds_are_found_by_name():
    assert isinstance(small_model("transcriber"), Transcriber)
    assert isinstance(small_model("bilstm_transcriber"), BiLSTMTranscriber)


def test_a_row_without_frames_is_read_as_one_of_zeros():
    model, x = small_model("bilstm_transcriber").double().eval(), torch.randn(2, 8, 6).double()
    padding = torch.tensor([[False] * 8, [True] * 8])
    y = model(x, key_padding_mask=padding)
    assert y.isfinite().all()
    torch.testing.assert_close(y[:1], model(x[:1]))
