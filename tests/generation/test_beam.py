import math
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from unrolled.generation import beam_search, generate, translate
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


def exhaustive(model: Decoder, prompt: list[int], most: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Score every continuation that ends with the stop symbol, or has the most tokens, by its definition."""
    V = model.config.vocab_size
    scored = []
    for n in range(1, most + 1):
        for ids in product(range(V), repeat=n):
            if STOP in ids[:-1] or (ids[-1] != STOP and n < most):
                continue
            read = torch.tensor([[V, *prompt, *ids]])
            with torch.no_grad():
                log_p = model(read[:, :-1])[0].log_softmax(-1)
            chosen = log_p[-n:].gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
            scored.append((chosen / ((5 + n) / 6) ** alpha, list(ids)))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_beam_that_holds_everything_is_an_exhaustive_search(seed, alpha):
    model, prompts, most = decoder(seed=seed), [[1], [3]], 4
    logits, state = started(model, prompts)
    found = beam_search(
        model, logits, state, beam_size=400, length_penalty=alpha, max_new_tokens=most, stop=STOP
    )
    for prompt, hypotheses in zip(prompts, found, strict=True):
        expected = exhaustive(model, prompt, most, alpha)
        assert len(hypotheses) == len(expected)
        assert [h.tokens.tolist() for h in hypotheses] == [ids for _, ids in expected]
        for hypothesis, (score, _) in zip(hypotheses, expected, strict=True):
            assert hypothesis.score == pytest.approx(score, abs=1e-10)
            n = len(hypothesis.tokens)
            assert hypothesis.log_prob / ((5 + n) / 6) ** alpha == pytest.approx(hypothesis.score, abs=1e-12)


def beam_of_lists(model: Decoder, prompt: list[int], size: int, most: int) -> dict[tuple[int, ...], float]:
    """Beam search as it is described: every beginning is read anew, and a finished one keeps its place."""
    V = model.config.vocab_size
    finished: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    while beam:
        following = {}
        for ids, log_p in beam.items():
            with torch.no_grad():
                logs = model(torch.tensor([[V, *prompt, *ids]]))[0, -1].log_softmax(-1).tolist()
            following |= {(*ids, token): log_p + x for token, x in enumerate(logs)}
        best = sorted(following, key=lambda ids: -following[ids])[: size - len(finished)]
        done = {ids for ids in best if ids[-1] == STOP or len(ids) == most}
        finished |= {ids: following[ids] for ids in done}
        beam = {ids: following[ids] for ids in best if ids not in done}
    return finished


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_of_any_size_is_that_of_its_description(seed, size):
    model, prompts = decoder(vocab_size=7, seed=seed, scale=1.0), [[1], [2], [6]]
    found = beam_search(model, *started(model, prompts), beam_size=size, max_new_tokens=5, stop=STOP)
    lengths = set()
    for prompt, hypotheses in zip(prompts, found, strict=True):
        wanted = beam_of_lists(model, prompt, size, 5)
        assert {tuple(h.tokens.tolist()) for h in hypotheses} == set(wanted)
        for h in hypotheses:
            assert h.log_prob == pytest.approx(wanted[tuple(h.tokens.tolist())], abs=1e-10)
            lengths.add(len(h.tokens))
    assert len(lengths) > 1  # some end before others


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
        narrow, wide = (
            beam_search(model, logits, state, beam_size=k, length_penalty=0, max_new_tokens=5, stop=STOP)[0][
                0
            ].log_prob
            for k in (1, 50)
        )
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0, but must be a whole number of at least 1"),
        ({"beam_size": True}, "beam_size is True, but must be a whole number of at least 1"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0, but must be a number of at least 0"),
        ({"length_penalty": math.nan}, "length_penalty is nan, but must be"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, but must be at least 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, but must be at least 0, one whole number"),
        ({"stop": 9}, r"stop is 9, but must be an id in \[0, 9\)"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"sources": [[1], []]}, r"sources\[1\] is empty, but must have at least one token"),
        ({"sources": [[0.5]]}, r"sources\[0\] is torch.float32 of shape \[1\], but must be whole numbers"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        translate(Copies(), **{"sources": [[1]]} | options)


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="the logits of new token 1 hold NaN"):
        beam_search(Copies(), torch.full((1, 9), math.nan), None, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"logits has shape \[9\], but must be \[B, V\]"):
        beam_search(Copies(), torch.zeros(9), None, max_new_tokens=3)
    with pytest.raises(
        ValueError, match="max_new_tokens is \\[1, 2\\], but must be at least 0, one whole number or 1"
    ):
        beam_search(Copies(), torch.zeros(1, 9), None, max_new_tokens=[1, 2])


def test_logits_without_any_probability_are_refused():
    for value in (-math.inf, math.inf):
        with pytest.raises(ValueError, match="the logits of new token 1 hold NaN, infinity or"):
            beam_search(Copies(), torch.full((1, 9), value), None, max_new_tokens=3)


def test_what_a_model_says_after_the_end_is_not_looked_at():
    class SilentAfterTheEnd(Copies):
        def step(self, token, state):
            logits, state = super().step(token, state)
            return logits.masked_fill((token == STOP).unsqueeze(1), math.nan), state

    model, options = SilentAfterTheEnd(), {"beam_size": 4, "stop": STOP, "max_new_tokens": 6}
    found = translate(model, [[3, 1, 4], [2]], **options)
    assert [row.tolist() for row in found] == [
        row.tolist() for row in translate(Copies(), [[3, 1, 4], [2]], **options)
    ]


def test_what_is_found_can_be_trained_on():
    model = decoder()
    (hypotheses,) = beam_search(model, *started(model, [[1]]), max_new_tokens=3)
    tokens = hypotheses[0].tokens.unsqueeze(0)
    model.loss(tokens, tokens).backward()
    tokens.add_(0)
