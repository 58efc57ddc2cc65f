"""The search is that of Hugging Face transformers, but for what a length is worth and which n-grams count."""

from typing import Any

import pytest
import torch
from beams import described, log_probs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unrolled.generation import beam_search
from unrolled.models import Decoder

transformers = pytest.importorskip("transformers")

from unrolled.interop import hf  # noqa: E402

SINGLE = 2e-5  # theirs adds log p in fp32, up to 9 of them
SEARCHES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "vocab_size": st.integers(9, 12),
        "size": st.integers(2, 5),
        "most": st.integers(1, 9),
        "early_stopping": st.sampled_from([False, True, "never"]),
        "stop": st.lists(st.integers(0, 7), max_size=4, unique=True),
        "least": st.integers(0, 4),
        "ngram": st.integers(0, 3),
    }
)


def made(seed: int, vocab_size: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "attention": "softmax", "start_token": True}
    model = hf.UnrolledForCausalLM(hf.UnrolledConfig(vocab_size=vocab_size, **sizes)).double().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    return model


def theirs(model: Any, prompts: list[list[int]], *, size: int, most: int, **options: Any) -> list[Any]:
    """Score and new tokens of all that `generate` finds, for each prompt."""
    read = torch.tensor([[model.config.vocab_size, *prompt] for prompt in prompts])
    out = model.generate(
        read,
        num_beams=size,
        num_return_sequences=size,
        max_new_tokens=most,
        do_sample=False,
        pad_token_id=1000,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows, vocabulary = out.sequences[:, read.shape[1] :].tolist(), range(model.config.vocab_size)
    tokens = [tuple(token for token in row if token in vocabulary) for row in rows]
    found = list(zip(out.sequences_scores.tolist(), tokens, strict=True))
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    return [[h for h in group if h[0] > -1e8] for group in groups]  # without those that stand for none


def ours(model: Decoder, prompts: list[list[int]], **options: Any) -> list[Any]:
    tokens = torch.tensor([[model.config.vocab_size, *prompt] for prompt in prompts])
    with torch.no_grad():
        logits, state = model.prefill(tokens, model.init_state(len(prompts)))
    found = beam_search(model, logits[:, -1], state, **options)
    return [[(h.score, tuple(h.tokens.tolist())) for h in hypotheses] for hypotheses in found]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [ids for _, ids in found] == [ids for _, ids in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=SINGLE)


def options_of(search: dict[str, Any]) -> dict[str, Any]:
    """The options that have one name and one meaning there and here."""
    return {
        "early_stopping": search["early_stopping"],
        "min_new_tokens": min(search["least"], search["most"]),
        "no_repeat_ngram_size": search["ngram"],
    }


@settings(max_examples=50, derandomize=True)
@given(SEARCHES)
def test_without_a_length_penalty_ours_is_theirs(search):
    model = made(search["seed"], search["vocab_size"])
    size, most, stop = (search[name] for name in ("size", "most", "stop"))
    options = options_of(search) | {"length_penalty": 0.0}
    (expected,) = theirs(model, [[]], size=size, most=most, eos_token_id=stop or None, **options)
    (found,) = ours(model.model, [[]], beam_size=size, max_new_tokens=most, stop=stop, **options)
    assert_same(found, expected)


@settings(max_examples=50, derandomize=True)
@given(SEARCHES, st.sampled_from([0.5, 1.0, 2.0]))
def test_with_a_power_of_the_length_for_its_penalty_the_description_is_theirs(search, power):
    """`test_beam.py` shows that ours is the description with the penalty of Wu et al."""
    model = made(search["seed"], search["vocab_size"])
    size, most, stop = (search[name] for name in ("size", "most", "stop"))
    options = options_of(search) | {"length_penalty": power, "eos_token_id": stop or None}
    (expected,) = theirs(model, [[]], size=size, most=most, **options)
    pool = described(
        log_probs_of(model.model, [model.config.vocab_size]),
        size=size,
        most=most,
        penalty=lambda n: n**power,
        early_stopping=search["early_stopping"],
        stops=[(token,) for token in stop],
        least=min(search["least"], most),
        ngram=search["ngram"],
    )
    assert_same([(score, ids) for score, _, ids in pool], expected)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_ends_theirs_and_ours_alike(seed, early_stopping):
    model = made(seed, 8)
    options = {"length_penalty": 0.0, "early_stopping": early_stopping}
    free = ours(model.model, [[]], beam_size=3, max_new_tokens=8, **options)
    stop = list(free[0][0][1][2:4])

    def ends(ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.tensor([row[1:][-2:] == stop for row in ids.tolist()])

    stopping = transformers.StoppingCriteriaList([ends])
    (expected,) = theirs(model, [[]], size=3, most=8, stopping_criteria=stopping, **options)
    (found,) = ours(model.model, [[]], beam_size=3, max_new_tokens=8, stop=[stop], **options)
    assert_same(found, expected)
    assert any(ids[-2:] == tuple(stop) for _, ids in found)


def test_of_a_prompt_their_n_grams_count_and_ours_do_not():
    model, prompt = made(1, 8), [1, 2, 3, 1, 2]
    options = {"size": 3, "most": 6, "length_penalty": 0.0}
    with_prompt = theirs(model, [prompt], no_repeat_ngram_size=1, **options)

    def of_new_tokens(ids: Tensor, scores: Tensor) -> Tensor:
        return transformers.NoRepeatNGramLogitsProcessor(1)(ids[:, 1 + len(prompt) :], scores)

    processors = transformers.LogitsProcessorList([of_new_tokens])
    of_new = theirs(model, [prompt], logits_processor=processors, **options)
    options = {"beam_size": 3, "max_new_tokens": 6, "length_penalty": 0, "no_repeat_ngram_size": 1}
    found = ours(model.model, [prompt], **options)
    assert_same(found[0], of_new[0])
    assert of_new[0] != with_prompt[0]
