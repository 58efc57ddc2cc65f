import math
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from beams import Ids, allowed, described, log_probs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model
from torch import Tensor

from unrolled.generation import beam_search, generate, n_best, translate
from unrolled.models import Decoder, DecoderConfig

STOP = 0


def decoder(vocab_size: int = 4, seed: int = 0, scale: float = 3.0) -> Decoder:
    """A small model whose predictions depend on all that came before, and are far from uniform."""
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "attention": "softmax", "dropout": 0.5}
    model = Decoder(DecoderConfig(vocab_size, start_token=True, **sizes)).double()
    for parameter in model.parameters():
        parameter.data += scale * torch.randn_like(parameter) / 4
    return model


def started(model: Decoder, prompts: list[list[int]]) -> tuple[Tensor, NamedTuple]:
    model.eval()
    tokens = torch.tensor([[model.config.vocab_size, *prompt] for prompt in prompts])
    with torch.no_grad():
        logits, state = model.prefill(tokens, model.init_state(len(prompts)))
    return logits[:, -1], state


def exhaustive(
    model: Decoder, prompt: list[int], most: int, alpha: float, stops: list[Ids], least: int, ngram: int
) -> list[tuple[float, list[int]]]:
    """Score every continuation that is allowed and ends, or has the most tokens, by its definition."""
    V = model.config.vocab_size
    scored = []
    for n in range(1, most + 1):
        for ids in product(range(V), repeat=n):
            ends = [end for end in range(1, n + 1) if any(ids[:end][-len(s) :] == s for s in stops)]
            if ends[:1] != [n] and (ends or n < most):
                continue
            if not all(allowed(ids[:end], stops, least, ngram) for end in range(1, n + 1)):
                continue
            read = torch.tensor([[V, *prompt, *ids]])
            with torch.no_grad():
                log_p = model(read[:, :-1])[0].log_softmax(-1)
            chosen = log_p[-n:].gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
            scored.append((chosen / ((5 + n) / 6) ** alpha, list(ids)))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    ("seed", "alpha", "stops", "least", "ngram"),
    [
        (0, 0.0, [(STOP,)], 0, 0),
        (1, 0.6, [(STOP,)], 0, 0),
        (2, 2.0, [(STOP,)], 2, 0),
        (3, 0.6, [(1, 2), (3,)], 0, 0),
        (4, 0.6, [(1, 2), (2, 1, 2), (3,)], 2, 0),
        (5, 0.6, [(STOP,)], 0, 1),
        (6, 0.6, [(STOP,), (1, 1)], 1, 2),
        (7, 0.6, [], 4, 3),
    ],
)
def test_a_beam_that_holds_everything_is_an_exhaustive_search(
    seed, alpha, stops, least, ngram, early_stopping
):
    model, prompts, most = decoder(seed=seed), [[1], [3]], 4
    logits, state = started(model, prompts)
    options = {"length_penalty": alpha, "early_stopping": early_stopping, "min_new_tokens": least}
    options |= {"no_repeat_ngram_size": ngram, "stop": [list(ids) for ids in stops]}
    found = beam_search(model, logits, state, beam_size=400, max_new_tokens=most, **options)
    for prompt, hypotheses in zip(prompts, found, strict=True):
        expected = exhaustive(model, prompt, most, alpha, stops, least, ngram)
        assert len(expected) > 10
        assert [h.tokens.tolist() for h in hypotheses] == [ids for _, ids in expected]
        for hypothesis, (score, _) in zip(hypotheses, expected, strict=True):
            assert hypothesis.score == pytest.approx(score, abs=1e-10)
            n = len(hypothesis.tokens)
            assert hypothesis.log_prob / ((5 + n) / 6) ** alpha == pytest.approx(hypothesis.score, abs=1e-12)


@settings(max_examples=50, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    V=st.integers(2, 9),
    size=st.integers(1, 6),
    most=st.lists(st.integers(1, 8), min_size=3, max_size=3),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    stops=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    least=st.integers(0, 4),
    ngram=st.integers(0, 3),
)
def test_a_beam_of_any_size_is_that_of_its_description(
    seed, V, size, most, alpha, early_stopping, stops, least, ngram
):
    model, prompts = decoder(vocab_size=V, seed=seed, scale=1.0), [[1], [0], [V - 1]]
    least, stops = min(least, *most), [[token % V for token in ids] for ids in stops]
    options = {"length_penalty": alpha, "early_stopping": early_stopping, "min_new_tokens": least}
    options |= {"no_repeat_ngram_size": ngram, "stop": [ids[0] if len(ids) == 1 else ids for ids in stops]}
    found = beam_search(model, *started(model, prompts), beam_size=size, max_new_tokens=most, **options)
    same = {"size": size, "early_stopping": early_stopping, "least": least, "ngram": ngram}
    same |= {"stops": [tuple(ids) for ids in stops], "penalty": lambda n: ((5 + n) / 6) ** alpha}
    for prompt, limit, hypotheses in zip(prompts, most, found, strict=True):
        expected = described(log_probs_of(model, [V, *prompt]), most=limit, **same)
        assert [tuple(h.tokens.tolist()) for h in hypotheses] == [ids for _, _, ids in expected]
        for h, (score, log_prob, _) in zip(hypotheses, expected, strict=True):
            assert (h.score, h.log_prob) == pytest.approx((score, log_prob), abs=1e-10)


def test_a_search_goes_on_where_all_that_is_likeliest_ends():
    logits = torch.tensor([[5.4, 5.3, 5.2, 5.1, 5.0, 1.0, 0.9, 0.8, 0.7]])

    class Same(Copies):
        def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
            return logits.expand(len(token), 9), state

    options = {"length_penalty": 8.0, "early_stopping": "never", "max_new_tokens": 3}
    (found,) = beam_search(Same(), logits, (), beam_size=1, stop=[0, 1, 2, 3], **options)
    assert [h.tokens.tolist() for h in found] == [[4, 4, 0]]


def test_the_later_a_search_ends_the_better_its_best():
    better = {False: 0, "never": 0}
    for seed in range(30):
        model = decoder(vocab_size=6, seed=seed, scale=1.0)
        logits, state = started(model, [[1]])
        options = {"beam_size": 2, "length_penalty": 2.0, "max_new_tokens": 9, "stop": [0, 5]}
        best = {
            when: beam_search(model, logits, state, early_stopping=when, **options)[0][0].score
            for when in (True, False, "never")
        }
        assert best[True] <= best[False] <= best["never"]
        better[False] += best[True] < best[False]
        better["never"] += best[False] < best["never"]
    assert min(better.values()) > 0


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_is_greedy(seed):
    model = decoder(vocab_size=7, seed=seed)
    prompts = [[1, 2], [3, 4], [5, 6]]
    found = beam_search(model, *started(model, prompts), beam_size=1, max_new_tokens=9, stop=STOP)
    greedy = generate(model, prompts, 9, temperature=0, stop=STOP)
    assert [h.tokens.tolist() for (h,) in found] == [row.tolist() for row in greedy]


def test_a_larger_beam_may_find_what_greedy_decoding_misses():
    better = 0
    for seed in range(8):
        model = decoder(vocab_size=7, seed=seed)
        logits, state = started(model, [[1]])
        options = {"length_penalty": 0, "max_new_tokens": 5, "stop": STOP}
        found = (beam_search(model, logits, state, beam_size=k, **options) for k in (1, 50))
        narrow, wide = (hypotheses[0].log_prob for (hypotheses,) in found)
        assert wide >= narrow - 1e-10
        better += wide > narrow + 1e-6
    assert better > 0


def test_rows_do_not_touch_each_other_and_the_state_is_not_changed():
    model, prompts = decoder(vocab_size=7, seed=3), [[1], [2], [6]]
    logits, state = started(model, prompts)
    before = [x.clone() for x in (state.position, *state.layers[0])]
    together = beam_search(model, logits, state, beam_size=3, max_new_tokens=[6, 0, 2], stop=STOP)
    assert together[1] == []
    for row, most in ((0, 6), (2, 2)):
        alone = beam_search(
            model, *started(model, [prompts[row]]), beam_size=3, max_new_tokens=most, stop=STOP
        )[0]
        assert [h.tokens.tolist() for h in alone] == [h.tokens.tolist() for h in together[row]]
        assert max(len(h.tokens) for h in alone) <= most
    assert all(map(torch.equal, before, (state.position, *state.layers[0])))


def test_without_a_stop_symbol_every_continuation_has_the_most_tokens():
    model = decoder()
    found = beam_search(model, *started(model, [[1]]), beam_size=4, max_new_tokens=3)
    assert [len(h.tokens) for h in found[0]] == [3] * 4
    assert [h.score for h in found[0]] == sorted((h.score for h in found[0]), reverse=True)
    assert len({tuple(h.tokens.tolist()) for h in found[0]}) == 4


def test_the_model_is_handed_back_in_its_mode():
    model = decoder()
    logits, state = started(model, [[1]])
    model.train()
    first = beam_search(model, logits, state, max_new_tokens=3)
    assert model.training
    assert model.stack.training
    again = beam_search(model, logits, state, max_new_tokens=3)  # dropout was off
    assert [h.score for h in first[0]] == [h.score for h in again[0]]


class Copies:
    """A stand-in for an encoder-decoder that says the source again: its state is the source and a place."""

    config = SimpleNamespace(vocab_size=9, start_token=True)

    class State(NamedTuple):
        source: Tensor
        padding: Tensor
        place: Tensor

    def init_state(self, source: Tensor, *, key_padding_mask: Tensor | None = None) -> State:
        padding = torch.zeros_like(source, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        return self.State(source, padding, torch.zeros(len(source), dtype=torch.long))

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        assert ((token == 9) == (state.place == 0)).all()  # the start symbol, and only at the start
        source, padding, place = state
        wide = torch.cat([source.masked_fill(padding, STOP), torch.zeros_like(source[:, :1])], 1)
        logits = torch.zeros(len(token), 9)
        logits.scatter_(1, wide.gather(1, place.clamp(max=source.shape[1]).unsqueeze(1)), 4.0)
        return logits, self.State(source, padding, place + 1)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_translations_come_in_the_order_of_their_sources(beam_size):
    sources = [[3, 1, 4, 1, 5], [2], torch.tensor([7, 1, 8]), [2, 7, 1, 8, 2, 8]]
    found = translate(Copies(), sources, beam_size=beam_size, stop=STOP, batch_size=3)
    assert [row.tolist() for row in found] == [[*list(source), STOP] for source in sources]
    assert translate(Copies(), [], stop=STOP) == []


def test_a_translation_is_at_most_fifty_tokens_longer_than_its_source():
    assert [len(row) for row in translate(Copies(), [[1], [1, 2, 3]])] == [51, 53]
    assert [len(row) for row in translate(Copies(), [[1], [1, 2, 3]], max_new_tokens=2)] == [2, 2]
    assert [len(row) for row in translate(Copies(), [[1]], max_new_tokens=0)] == [0]
    assert [len(row) for row in translate(Copies(), [[1], [1, 2, 3]], min_new_tokens=52)] == [52, 53]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0, but must be a whole number of at least 1"),
        ({"beam_size": True}, "beam_size is True, but must be a whole number of at least 1"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0, but must be a number from 0 to 50"),
        ({"length_penalty": math.nan}, "length_penalty is nan, but must be"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, but must be a whole number of at least 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, but must be a whole number of at least 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True, but must be a whole number of at least 0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1, but must be a whole number of at least 0"),
        ({"min_new_tokens": 1.0}, "min_new_tokens is 1.0, but must be a whole number"),
        (
            {"min_new_tokens": 4, "max_new_tokens": 3},
            "min_new_tokens is 4, but must be at most max_new_tokens = 3",
        ),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1, but must be a whole number of at"),
        ({"no_repeat_ngram_size": None}, "no_repeat_ngram_size is None, but must be a whole number"),
        ({"early_stopping": "always"}, "early_stopping is 'always', but must be True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1, but must be True, False or 'never'"),
        ({"early_stopping": None}, "early_stopping is None, but must be True, False or 'never'"),
        ({"stop": 9}, r"stop holds \[9\], with a token id outside \[0, 9\)"),
        ({"stop": [1, [2, -1]]}, r"stop holds \[2, -1\], with a token id outside \[0, 9\)"),
        ({"stop": [[]]}, "stop holds an empty sequence, which every continuation ends with"),
        ({"stop": "0"}, "stop is '0', but must be an id, or ids or sequences of them"),
        ({"stop": 1.5}, "stop is 1.5, but must be a token id, or a list of ids"),
        *(({"sources": [], name: -1}, name) for name in ("beam_size", "max_new_tokens", "early_stopping")),
        ({"batch_size": 2.5}, "batch_size is 2.5, but must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size is 0, but must be an integer of at least 1"),
        ({"sources": [[1], []]}, r"sources\[1\] is empty, but must have at least one token"),
        ({"beam_size": 10_001}, "beam_size is 10001, but must be at most 10000"),
        ({"length_penalty": 51}, "length_penalty is 51, but must be a number from 0 to 50"),
        ({"length_penalty": 10**400}, "length_penalty is 10*, but must be a number from 0 to 50"),
        ({"sources": [[True]]}, r"sources\[0\] is torch.bool of shape \[1\], but must be whole numbers"),
        ({"sources": [[1j]]}, r"sources\[0\] is torch.complex64 of shape \[1\], but must be whole numbers"),
        ({"sources": [5]}, r"sources\[0\] is 5, but must be a sequence of whole numbers"),
        ({"sources": [[0.5]]}, r"sources\[0\] is torch.float32 of shape \[1\], but must be whole numbers"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        translate(Copies(), **{"sources": [[1]]} | options)


def test_all_hypotheses_of_a_source_are_returned_best_first():
    sources = [[3, 1, 4], [2], [7, 1]]
    found = n_best(Copies(), sources, beam_size=3, stop=STOP)
    for source, hypotheses in zip(sources, found, strict=True):
        assert len(hypotheses) == 3
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert hypotheses[0].tokens.tolist() == [*source, STOP]
    best = translate(Copies(), sources, beam_size=3, stop=STOP)
    assert [h[0].tokens.tolist() for h in found] == [tokens.tolist() for tokens in best]


def test_where_everything_is_ruled_out_there_is_no_hypothesis():
    options = {"no_repeat_ngram_size": 1, "max_new_tokens": 10}  # 9 tokens, each once
    assert n_best(Copies(), [[1, 2]], **options) == [[]]
    assert [row.tolist() for row in translate(Copies(), [[1, 2]], **options)] == [[]]


@pytest.mark.parametrize(
    ("logits", "most", "message"),
    [
        (torch.full((1, 9), math.nan), 3, r"logits of new token 1 hold NaN, \+inf or only -inf"),
        (torch.full((1, 9), math.inf), 3, "logits of new token 1 hold"),
        (torch.full((1, 9), -math.inf), 3, "logits of new token 1 hold"),
        (torch.zeros(9), 3, r"logits has shape \[9\], but must be \[B, V\]"),
        (torch.zeros(1, 9), [1, 2], r"max_new_tokens is \[1, 2\], but must be .* or 1 of them"),
    ],
)
def test_logits_and_limits_that_do_not_fit_are_refused(logits, most, message):
    with pytest.raises(ValueError, match=message):
        beam_search(Copies(), logits, None, max_new_tokens=most)


def test_logits_after_the_end_are_ignored():
    class SilentAfterTheEnd(Copies):
        def step(self, token, state):
            logits, state = super().step(token, state)
            return logits.masked_fill((token == STOP).unsqueeze(1), math.nan), state

    options = {"beam_size": 4, "stop": STOP, "max_new_tokens": 6}
    found, expected = (
        translate(model, [[3, 1, 4], [2]], **options) for model in (SilentAfterTheEnd(), Copies())
    )
    assert all(map(torch.equal, found, expected))


def test_what_is_found_can_be_trained_on():
    model = decoder()
    (hypotheses,) = beam_search(model, *started(model, [[1]]), max_new_tokens=3)
    tokens = hypotheses[0].tokens.unsqueeze(0)
    model.loss(tokens, tokens).backward()
    tokens.add_(0)


class Same:
    """A stand-in whose logits never change."""

    config = SimpleNamespace(vocab_size=9, start_token=True)

    def init_state(self, source, *, key_padding_mask=None):
        return ()

    def step(self, token, state):
        return torch.arange(9.0).expand(len(token), 9), state


def test_logits_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match="logits is a list, but must be a tensor"):
        beam_search(Same(), [[0.0] * 9], (), max_new_tokens=2)


def test_logits_of_half_precision_are_added_up_in_double():
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = (beam_search(Same(), x, (), max_new_tokens=1)[0] for x in (logits, logits.double()))
    assert [h.log_prob for h in found] == [h.log_prob for h in expected]


def test_sources_may_have_any_type_of_integers():
    model = small_model("encoder_decoder")
    expected, found = (translate(model, [torch.tensor([1, 2], dtype=t)]) for t in (torch.long, torch.int32))
    assert torch.equal(found[0], expected[0])


def test_the_defaults_of_a_search_are_those_of_the_documents():
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3, 5.0, -5.0, -5.1, -5.2, -5.3]])

    class Likely(Same):
        def step(self, token, state):
            return logits.expand(len(token), 9), state

    def searched(**options):
        (found,) = beam_search(Likely(), logits, (), max_new_tokens=9, stop=[0, 1, 2, 3], **options)
        return [(h.tokens.tolist(), h.score) for h in found]

    found = searched()
    assert found == searched(beam_size=4, length_penalty=0.6, early_stopping=False)
    for other in ({"beam_size": 5}, {"length_penalty": 1.0}, {"early_stopping": True}):
        assert searched(**other) != found


def test_sources_of_similar_length_are_read_together():
    shapes = []

    class Noting(Same):
        def init_state(self, source, *, key_padding_mask=None):
            shapes.append(tuple(source.shape))
            return ()

    translate(Noting(), [[1], [1] * 9, [2], [2] * 9], batch_size=2, max_new_tokens=1)
    assert shapes == [(2, 1), (2, 9)]


def test_a_model_is_told_where_sources_are_padded():
    told = []

    class Told(Copies):
        def init_state(self, source, *, key_padding_mask=None):
            told.append(key_padding_mask)
            return super().init_state(source, key_padding_mask=key_padding_mask)

    translate(Told(), [[1], [1, 2, 3]], stop=STOP)
    translate(Told(), [[1, 2], [3, 4]], stop=STOP)
    assert told[0].tolist() == [[False, True, True], [False, False, False]]
    assert told[1] is None
