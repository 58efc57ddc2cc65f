"""What is said by frames: the best path, and a search that adds up the paths that say the same."""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from unrolled.generation import transcribe
from unrolled.generation.transcription import best_path, decode, prefix_search


def all_sequences(log_probs):
    """The probability of everything that may be said, from all paths."""
    T, n = log_probs.shape
    found = defaultdict(float)
    for path in itertools.product(range(n), repeat=T):
        merged = tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != n - 1)
        found[merged] += math.exp(sum(float(log_probs[t, symbol]) for t, symbol in enumerate(path)))
    return found


def drawn(T, n, seed, sharpness):
    noise = torch.randn(T, n, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return (sharpness * noise).log_softmax(-1)


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(2, 4), st.integers(0, 1_000), st.floats(0.1, 3))
def test_a_search_that_drops_nothing_is_exact(T, n, seed, sharpness):
    log_probs = drawn(T, n, seed, sharpness)
    expected = all_sequences(log_probs)
    found = prefix_search(log_probs, beam_size=10_000)
    said = {tuple(ids.tolist()): math.exp(x) for ids, x in found if x > -math.inf}
    assert said.keys() == expected.keys()
    for ids, p in said.items():
        assert p == pytest.approx(expected[ids], rel=1e-9)
    assert [x for _, x in found] == sorted((x for _, x in found), reverse=True)
    assert expected[tuple(found[0][0].tolist())] == pytest.approx(max(expected.values()), rel=1e-9)


def test_a_narrow_search_keeps_at_most_its_size_and_never_overstates():
    for seed in range(20):
        log_probs = drawn(5, 4, seed, 1.0)
        expected = all_sequences(log_probs)
        found = prefix_search(log_probs, beam_size=4)
        assert len(found) == 4
        assert all(math.exp(x) <= expected[tuple(ids.tolist())] * (1 + 1e-9) for ids, x in found)


def test_the_search_adds_up_paths_where_the_best_path_does_not():
    # the likeliest path has two blanks, of 0.36, but three paths say the symbol, of 0.64
    log_probs = torch.tensor([[0.4, 0.6], [0.4, 0.6]]).log()
    assert best_path(log_probs).tolist() == []
    assert decode(log_probs).tolist() == []
    ids, log_p = prefix_search(log_probs, 8)[0]
    assert ids.tolist() == [0]
    assert math.exp(log_p) == pytest.approx(0.64, rel=1e-6)
    assert decode(log_probs, beam_size=8).tolist() == [0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [([0, 0, 2, 0, 1], [0, 0, 1]), ([2, 2, 2], []), ([1, 1, 0, 0], [1, 0]), ([], [])],
)
def test_the_best_path_merges_repeats_and_drops_blanks(path, expected):
    log_probs = torch.full((len(path), 3), -9.0)
    for t, symbol in enumerate(path):
        log_probs[t, symbol] = 0.0
    assert decode(log_probs).tolist() == expected


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("kind", ["transcriber", "bilstm_transcriber"])
def test_sounds_of_any_lengths_are_transcribed_as_alone(kind, beam_size):
    torch.manual_seed(0)
    model = small_model(kind)
    with torch.no_grad():
        model.head.project.weight.mul_(30)  # so that not everything is a blank
    sounds = [torch.randn(n, 6) for n in (50, 7, 90, 31)]
    found = transcribe(model, sounds, beam_size=beam_size, batch_size=3)
    assert model.training
    model.eval()
    with torch.no_grad():
        alone = [decode(model(sound[None])[0], beam_size=beam_size).tolist() for sound in sounds]
    assert [ids.tolist() for ids in found] == alone
    assert any(alone)
    assert not any(ids.is_inference() for ids in found)
    assert transcribe(model, []) == []


@pytest.mark.parametrize("name", ["beam_size", "batch_size"])
def test_sizes_of_0_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0, but must be an integer of at least 1"):
        transcribe(small_model("transcriber"), [], **{name: 0})


@pytest.mark.parametrize("size", [0, -1])
def test_a_beam_of_none_is_refused(size):
    with pytest.raises(ValueError, match=f"beam_size is {size}, but must be an integer of at least 1"):
        decode(torch.zeros(5, 3), beam_size=size)


def test_wrong_frames_are_refused():
    with pytest.raises(ValueError, match=r"log_probs is of shape \[2\], but must be \[T, V \+ 1\]"):
        decode(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["transcriber", "bilstm_transcriber"])
def test_models_of_other_types_transcribe(kind, dtype):
    torch.manual_seed(0)
    model = small_model(kind)
    with torch.no_grad():
        model.head.project.weight.mul_(30)
    sounds = [torch.randn(50, 6), torch.randn(31, 6)]
    found = transcribe(model.to(dtype), sounds)
    assert any(len(ids) for ids in found)
    if dtype == torch.float64:
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in transcribe(model.float(), sounds)]


@pytest.mark.parametrize(
    ("sounds", "message"),
    [
        (
            [torch.zeros(5, 6), torch.zeros(5, 4)],
            r"sounds\[1\] is of shape \[5, 4\], but must be \[T, 6\] with T",
        ),
        ([torch.zeros(0, 6)], r"sounds\[0\] is of shape \[0, 6\], but must be"),
        ([torch.zeros(5, 6).numpy()], r"sounds\[0\] is .*, but must be a tensor"),
    ],
)
def test_wrong_sounds_are_refused(sounds, message):
    with pytest.raises(ValueError, match=message):
        transcribe(small_model("transcriber"), sounds)


def test_a_sound_of_no_axes_is_refused():
    with pytest.raises(
        ValueError, match=r"sounds\[0\] is of shape \[\], but must be \[T\] with T of at least 1"
    ):
        transcribe(small_model("transcriber"), [torch.tensor(1.0)])


def test_frames_without_a_blank_are_refused():
    with pytest.raises(ValueError, match=r"log_probs is of shape \[3, 0\], but must be \[T, V \+ 1\]"):
        decode(torch.zeros(3, 0))


def test_the_best_path_is_taken_by_default():
    class Fixed(torch.nn.Linear):
        def forward(self, x, *, key_padding_mask=None):
            return torch.tensor([[0.4, 0.6], [0.4, 0.6]]).log().expand(len(x), 2, 2)

        def frames(self, x, padding):
            return torch.full((len(x),), 2)

    assert [ids.tolist() for ids in transcribe(Fixed(1, 1), [torch.zeros(2, 6)])] == [[]]
    assert [ids.tolist() for ids in transcribe(Fixed(1, 1), [torch.zeros(2, 6)], beam_size=8)] == [[0]]
