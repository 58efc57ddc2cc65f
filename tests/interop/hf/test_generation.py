"""`generate` draws from the logits of one parallel forward, however its calls are split."""

import pytest
import torch
from hf_models import MECHANISMS, make, prompts

from unrolled.contract import UnsupportedError
from unrolled.interop import hf
from unrolled.ops.state import leaves

N = 12
"""New tokens, more than the window of 5."""
SINGLE = {"rtol": 1e-6, "atol": 1e-6}
"""`generate` rounds the logits of a model in double precision to single."""


@pytest.fixture(scope="module", params=MECHANISMS)
def model(request):
    """A model of each mechanism, shared by the tests."""
    return make(request.param)


@pytest.fixture
def ids():
    return prompts()


def generate(model, ids, **options):
    options = {"max_new_tokens": N, "do_sample": False} | options
    return model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)


def assert_logits_are_parallel(model, out, *, rows=None):
    """Compare the logits of each step with those of one forward over all the tokens."""
    tokens = out.sequences
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[:, -N - 1 : -1]
    for t, logits in enumerate(out.logits):
        stepped = logits if rows is None else logits[rows[:, t]]
        torch.testing.assert_close(stepped, whole[:, t].float(), **SINGLE)


def test_greedy(model, ids):
    out = generate(model, ids)
    assert_logits_are_parallel(model, out)
    assert torch.equal(out.sequences, generate(model, ids, use_cache=False).sequences)
    assert (out.logits[1] - out.logits[-1]).abs().max() > 0.1  # the logits are not constant


def test_only_the_logits_after_the_prompt_are_computed(ids):
    model, computed = make(), []
    model.model.head.register_forward_pre_hook(lambda head, inputs: computed.append(inputs[0].numel()))
    generate(model, ids)
    assert set(computed) == {2 * model.config.d_model}  # two rows, a position each


def test_sampling(model, ids):
    def draw(**options):
        torch.manual_seed(5)
        return generate(
            model, ids, do_sample=True, top_k=9, temperature=9.0, num_return_sequences=3, **options
        )

    out = draw()
    assert_logits_are_parallel(model, out)
    assert torch.equal(out.sequences, draw(use_cache=False).sequences)
    assert len(out.sequences.unique(dim=0)) == 6


def test_beams(model, ids):
    options = {"num_beams": 4, "num_return_sequences": 2}
    out = generate(model, ids, **options)
    assert_logits_are_parallel(model, out, rows=out.beam_indices)
    assert torch.equal(out.sequences, generate(model, ids, use_cache=False, **options).sequences)


@pytest.mark.parametrize("pad", [0, 99])
def test_rows_padded_on_the_left_generate_as_without_padding(model, ids, pad):
    padded = ids.clone()
    padded[0, :3] = pad
    mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
    together = generate(model, padded, attention_mask=mask)
    for row, start in ((0, 3), (1, 0)):
        alone = generate(model, ids[row : row + 1, start:])
        assert torch.equal(together.sequences[row, 7:], alone.sequences[0, 7 - start :])
        for t in range(N):
            torch.testing.assert_close(together.logits[t][row], alone.logits[t][0], **SINGLE)


def test_a_prompt_may_be_read_in_chunks(model, ids):
    out = generate(model, ids, prefill_chunk_size=3)
    assert_logits_are_parallel(model, out)


def test_a_state_is_continued(model, ids):
    with torch.no_grad():
        _, state = model.model.prefill(ids[:, :4], model.model.init_state(2))
    before = {name: x.clone() for name, x in leaves(state).items()}
    whole = generate(model, ids)
    for given in (state, hf.StateCache.of(state, 4)):
        out = generate(model, ids, cache=given)
        assert torch.equal(out.sequences, whole.sequences)
        assert_logits_are_parallel(model, out)
    assert all(torch.equal(x, before[name]) for name, x in leaves(state).items())
    assert given.get_seq_length() == 7 + N - 1  # the cache that was given is brought up to date


def test_the_cache_of_generate_is_continued(model, ids):
    first = generate(model, ids, max_new_tokens=5)
    second = generate(model, first.sequences, cache=first.cache, max_new_tokens=N - 5)
    assert torch.equal(second.sequences, generate(model, ids).sequences)


def test_several_tokens_after_a_cache_continue_it(model, ids):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 1] = mask[1, 4:6] = mask[0, 6] = 0  # padding in each chunk
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        cache, parts = None, []
        for start, end in ((0, 2), (2, 5), (5, 6), (6, 7)):
            shown = mask[:, :end] if start % 2 else mask[:, start:end]
            out = model(ids[:, start:end], attention_mask=shown, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    assert cache.get_seq_length() == 7
    valid = mask == 1
    torch.testing.assert_close(torch.cat(parts, dim=1)[valid], whole[valid], rtol=0, atol=1e-10)


def test_the_cache_of_linear_attention_has_constant_size(ids):
    model = make("linear")
    sizes = [generate(model, ids, max_new_tokens=n).cache.nbytes() for n in (2, 40)]
    assert sizes[0] == sizes[1] == model(ids).cache.nbytes()


@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize("pad", [0, 99])
def test_rows_that_have_ended_are_fed_padding(ids, pad, in_config):
    model = make("softmax")
    free = generate(model, ids).sequences
    other = set(free[1, 7:].tolist())
    end = next(token for token in free[0, 7:].tolist() if token not in other)
    if in_config:
        model.generation_config.pad_token_id = pad
    given = {} if in_config else {"pad_token_id": pad}
    ended = generate(model, ids, eos_token_id=end, **given).sequences
    stop = free[0].tolist().index(end, 7) + 1
    assert torch.equal(ended[0, :stop], free[0, :stop])
    assert (ended[0, stop:] == pad).all()
    assert stop < 7 + N - 1
    assert torch.equal(ended[1], free[1])


def test_beams_of_a_given_state_are_repeated_first(ids):
    model = make("linear")
    state = model(ids[:, :4]).cache.layers[0].state
    cache = hf.StateCache.of(state, 4)
    cache.batch_repeat_interleave(3)
    out = generate(model, ids, cache=cache, num_beams=3)
    assert torch.equal(out.sequences, generate(model, ids, num_beams=3).sequences)
    with pytest.raises(ValueError, match=r"state.position is torch.int64 of shape \[2\]"):
        generate(model, ids, cache=state, num_beams=3)


def test_a_state_of_padded_rows_is_continued(ids):
    model = make("softmax")
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        _, state = model.model.prefill(
            ids[:, :5], model.model.init_state(2), key_padding_mask=mask[:, :5] == 0
        )
    out = generate(model, ids, attention_mask=mask, cache=state)
    expected = generate(model, ids, attention_mask=mask)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits[0], expected.logits[0], **SINGLE)
    with pytest.raises(ValueError, match=r"has read \[3, 2\] tokens of its rows, but must have read as many"):
        generate(model, ids, attention_mask=torch.ones_like(mask), cache=state)


def test_new_tokens_continue_a_cache_with_a_mask_of_all(ids):
    model = make("softmax")
    with torch.no_grad():
        cache = model(ids[:, :5]).cache
    out = generate(model, ids[:, 5:], attention_mask=torch.ones_like(ids), cache=cache)
    assert torch.equal(out.sequences[:, 2:], generate(model, ids).sequences[:, 7:])


@pytest.mark.parametrize("given", [0, 5])
def test_inputs_that_have_all_been_read_are_refused(given, ids):
    """Transformers would read them a second time, or fail on none."""
    model = make("linear")
    with torch.no_grad():
        cache = model(ids).cache
    for past in (cache, cache.layers[0].state):
        with pytest.raises(
            ValueError, match=f"has read 7 positions, but must .* fewer than the {7 - given} of"
        ):
            generate(model, ids[:, given:], cache=past)
    out = generate(model, torch.cat([ids, ids[:, :1]], dim=1), cache=cache)
    assert out.sequences.shape == (2, 8 + N)


def test_a_state_that_ends_before_padding_has_read_all_of_the_inputs(ids):
    """The tokens after it are padding, whose logits mean nothing."""
    model, mask = make("linear"), (torch.arange(7) < 5).long().expand(2, -1)
    with torch.no_grad():
        _, state = model.model.prefill(ids[:, :5], model.model.init_state(2))
    with pytest.raises(ValueError, match="has read 7 positions, but must have read fewer than the 7 of"):
        generate(model, ids, attention_mask=mask, cache=state)


@torch.no_grad()
def test_a_cache_that_is_not_asked_for_is_not_returned(ids):
    model = make("linear")
    cache = model(ids[:, :5]).cache
    out = model(ids[:, 5:], cache=cache, use_cache=False)
    assert out.cache is None
    torch.testing.assert_close(out.logits, model(ids).logits[:, 5:])


@torch.no_grad()
def test_a_start_symbol_is_no_padding_although_it_pads(ids):
    """Its id follows those of the vocabulary, and the model has an embedding for it."""
    model = make("linear", start_token=True)
    model.generation_config.pad_token_id = model.config.vocab_size
    begun = torch.nn.functional.pad(ids, (1, 0), value=model.config.vocab_size)
    torch.testing.assert_close(model(begun).logits, model.model(begun))


def test_the_earlier_name_of_a_cache_is_accepted_but_not_both_names(ids):
    """Before transformers 5.24 a cache was `past_key_values`."""
    model = make("linear")
    with torch.no_grad():
        _, state = model.model.prefill(ids[:, :5], model.model.init_state(2))
        expected = model(ids[:, 5:], cache=state).logits
        assert torch.equal(model(ids[:, 5:], past_key_values=state).logits, expected)
        assert torch.equal(
            model.base_model(ids[:, 5:], past_key_values=state)[0],
            model.base_model(ids[:, 5:], cache=state)[0],
        )
    assert torch.equal(
        generate(model, ids, past_key_values=state).sequences, generate(model, ids, cache=state).sequences
    )
    for call in (model, model.base_model, model.generate):
        with pytest.raises(ValueError, match="cache and past_key_values are two names of one argument"):
            call(ids, cache=state, past_key_values=state)


def test_states_of_another_model_are_refused(ids):
    model = make("linear")
    for other in (make("softmax"), make("linear", n_heads=1), make("linear", n_layers=1)):
        cache = other(ids).cache
        for given in (cache, cache.layers[0].state):
            with pytest.raises(ValueError, match="a state of another model"):
                model(ids, cache=given)
    with pytest.raises(ValueError, match="cache is a list, but must be a StateCache"):
        model(ids, cache=[])
    with pytest.raises(ValueError, match="must be a StateCache of one StateLayer"):
        model(ids, cache=hf.StateCache([hf.StateLayer(), hf.StateLayer()]))


def test_a_state_cannot_be_rolled_back_so_assisted_decoding_is_refused(ids):
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        make("linear").generate(ids[:1], assistant_model=make("linear"), max_new_tokens=2)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_stop_strings_end_each_row_where_they_appear(options):
    characters = [chr(ord("a") + i) for i in range(17)]
    tokenizer, model = hf.character_tokenizer(characters), make("linear")
    given = tokenizer(["abc", "dea"], return_tensors="pt")
    how = {"max_new_tokens": N, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **options}
    whole = tokenizer.batch_decode(model.generate(**given, **how))
    stop = whole[0][6:8]  # of the first row, two letters across tokens
    found = tokenizer.batch_decode(
        model.generate(**given, **how, stop_strings=[stop], tokenizer=tokenizer), skip_special_tokens=True
    )
    assert found[0].endswith(stop)
    assert len(found[0]) < len(whole[0])
    if "num_beams" not in options:
        assert found[0] == whole[0][: whole[0].index(stop, 2) + 2]
    with pytest.raises(UnsupportedError, match=r"leave it out\. generate_batch gives it, and so does"):
        model(given.input_ids, position_ids=given.attention_mask)


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_a_mask_holds_although_its_padding_has_ids_of_the_vocabulary(name, ids):
    """The `pad_token_id` is outside the vocabulary, and no token is equal to it."""
    model = make(name)
    model.generation_config.pad_token_id = 99
    padded = torch.cat([ids[:, :2], ids], 1)
    mask = (torch.arange(9) >= 2).long().expand(2, -1)
    found = model(padded, attention_mask=mask).logits[:, 2:]
    torch.testing.assert_close(found, model(ids).logits)
    out = generate(model, padded, attention_mask=mask)
    torch.testing.assert_close(out.logits, generate(model, ids).logits)


@torch.no_grad()
def test_the_first_id_after_the_vocabulary_may_be_padding(ids):
    """`character_tokenizer` has this id for padding."""
    model = make("linear")
    model.generation_config.pad_token_id = model.config.vocab_size
    padded = torch.nn.functional.pad(ids, (2, 0), value=model.config.vocab_size)
    torch.testing.assert_close(model(padded).logits[:, 2:], model(ids).logits)
