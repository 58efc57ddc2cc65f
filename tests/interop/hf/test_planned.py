"""`generate` of transformers by a plan: the same tokens, and a cache from which the model goes on."""

import copy

import peft
import pytest
import torch
from hf_models import make, prompts

from unrolled.contract import UnsupportedError
from unrolled.decode import Plan
from unrolled.interop.hf import _planned
from unrolled.interop.hf.cache import StateCache
from unrolled.models import DecoderState
from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.state import leaves, map_tensors

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

N = 20


@pytest.fixture(params=["linear", "softmax", "window", "retention"])
def model(request):
    return make(request.param).float()


@pytest.fixture
def steps(monkeypatch):
    """Record the tokens that plans read."""
    found, step = [], Plan.step

    def noted(self, *args, **options):
        found.append(self.weights)
        return step(self, *args, **options)

    monkeypatch.setattr(Plan, "step", noted)
    return found


OPTIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 9, "top_p": 0.9, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_draws_the_same_tokens(model, options, steps):
    found = []
    for backend in ("native", "plain"):
        torch.manual_seed(3)
        with prefer(backend):
            found.append(model.generate(prompts(), max_new_tokens=N, min_new_tokens=N, **options))
        assert len(steps) == N - _planned.PLANNED_STEPS  # none by the second
    assert torch.equal(*found)


@torch.no_grad()
def test_the_cache_is_one_of_the_model_again(model, steps):
    out = model.generate(prompts(), max_new_tokens=N, min_new_tokens=N, return_dict_in_generate=True)
    cache, ids = out.cache, out.sequences
    assert steps
    assert isinstance(cache.only.state, DecoderState)
    found = model(ids[:, -1:], cache=cache).logits[:, -1]
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_state_that_was_read_during_generation_keeps_its_values(model, steps):
    cache, seen = StateCache(), []

    def note(ids, scores):
        seen.append((cache.only.state, map_tensors(torch.clone, cache.only.state)))
        return scores

    options = {"logits_processor": [note], "max_new_tokens": N, "min_new_tokens": N}
    model.generate(prompts(), cache=cache, **options)
    assert steps
    for state, copied in seen:
        torch.testing.assert_close(leaves(state), leaves(copied), rtol=0, atol=0)


@torch.no_grad()
def test_a_cache_that_was_given_is_continued(model, steps):
    ids, cache = prompts(), StateCache()
    model(ids[:, :4], cache=cache)
    found = model.generate(ids, cache=cache, max_new_tokens=N, min_new_tokens=N)
    assert steps
    assert isinstance(cache.only.state, DecoderState)
    assert torch.equal(found, model.generate(ids, max_new_tokens=N, min_new_tokens=N))


@torch.no_grad()
def test_what_is_kept_while_a_plan_runs_does_not_change(model, steps):
    cache, kept = StateCache(), {}

    def keep(ids, scores, **_):
        state = cache.only.state
        kept[ids.shape[1]] = state, map_tensors(torch.clone, state), copy.deepcopy(cache)
        return torch.zeros(len(ids), dtype=torch.bool)

    out = model.generate(prompts(), cache=cache, max_new_tokens=N, min_new_tokens=N, stopping_criteria=[keep])
    assert steps
    for length, (state, before, copied) in kept.items():
        assert isinstance(state, DecoderState)
        for x, y in zip(leaves(state).values(), leaves(before).values(), strict=True):
            assert torch.equal(x, y)
        expected = model(out[:, :length], use_cache=False).logits[:, -1]
        for given in (state, copy.deepcopy(copied)):  # which have not read the last token
            found = model(out[:, length - 1 : length], cache=given).logits[:, -1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    copied = kept[max(kept) - 3][2]
    assert torch.equal(model.generate(out[:, : max(kept) - 3], cache=copied, max_new_tokens=3), out)


def test_weights_may_be_rounded(steps):
    model = make().float()
    model.generate(prompts(), max_new_tokens=3, min_new_tokens=3, weights="int8")
    assert steps == ["int8"] * 2
    with pytest.raises(UnsupportedError, match="performer attention"):
        make("performer").float().generate(prompts(), max_new_tokens=3, weights="bf16")
    with pytest.raises(UnsupportedError, match="weights is 'int8', but a plan needs the cache"):
        model.generate(prompts(), max_new_tokens=3, weights="int8", use_cache=False)


def test_adapters_must_be_merged_before_a_plan_runs_them():
    model = make().float()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up"]), model)
    message = r"a plan cannot run peft\.\S+\.Linear, which is an adapter: merge it into the weights"
    with pytest.raises(UnsupportedError, match=message):
        model.generate(prompts(), max_new_tokens=3, weights="int8")


def test_models_that_a_plan_cannot_run_generate_by_themselves(steps):
    make("performer").float().generate(prompts(), max_new_tokens=N, min_new_tokens=N)
    make().generate(prompts(), max_new_tokens=N, min_new_tokens=N)  # fp64
    with torch.autocast("cpu", torch.bfloat16):
        make().float().generate(prompts(), max_new_tokens=N, min_new_tokens=N)
    assert not steps


def test_no_plan_replaces_a_model_whose_dropout_acts(steps):
    model = make(dropout=0.1).float()
    model.train().generate(prompts(), max_new_tokens=N, min_new_tokens=N)
    assert not steps
    model.eval().generate(prompts(), max_new_tokens=N, min_new_tokens=N)
    assert steps


def test_a_call_inside_another_has_its_own_plan(steps):
    first, second = make().float(), make("retention").float()
    with _planned.generation(first.model, "int8"):
        out = second.generate(prompts(), max_new_tokens=N, min_new_tokens=N)
    assert set(steps) == {"fp32"}
    assert torch.equal(out, second.generate(prompts(), max_new_tokens=N, min_new_tokens=N))


def test_an_error_leaves_the_model_as_it_was(steps):
    model, cache = make().float(), StateCache()

    def fail(ids, scores, **_):
        if ids.shape[1] > 18:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts(), cache=cache, max_new_tokens=N, stopping_criteria=[fail])
    assert isinstance(cache.only.state, DecoderState)
    assert torch.equal(*(model.generate(prompts(), max_new_tokens=5, do_sample=False) for _ in range(2)))


def test_a_cache_of_a_call_inside_generate_can_be_continued(model):
    kept = []

    def look(ids, logits):
        kept.append((ids, model(ids, use_cache=True).cache))
        return logits

    model.generate(prompts(), max_new_tokens=N, min_new_tokens=N, logits_processor=[look])
    for ids, cache in (kept[0], kept[-1]):
        found = model(ids[:, :1], cache=cache).logits
        torch.testing.assert_close(found, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:])


@torch.no_grad()
def test_another_model_that_is_called_inside_generate_reads_by_itself(steps):
    """As one that guides the draws."""
    model, other, kept = make().float(), make("retention").float(), []

    def look(ids, logits):
        kept.append((ids, other(ids[:, -1:], use_cache=True).logits))
        return logits

    model.generate(prompts(), max_new_tokens=N, min_new_tokens=N, logits_processor=[look])
    assert steps
    ids, logits = kept[-1]
    torch.testing.assert_close(logits, other(ids[:, -1:], use_cache=False).logits)


def test_a_compiled_model_has_no_graph_breaks():
    model = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(prompts()).logits, model(prompts()).logits)


@pytest.mark.slow
def test_a_compiled_model_generates_without_a_plan(steps):
    model, options = make().float(), {"max_new_tokens": N, "min_new_tokens": N, "do_sample": False}
    expected = model.generate(prompts(), **options)
    steps.clear()
    model.forward = torch.compile(model.forward, backend="eager")
    model.generate(prompts(), **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(prompts(), **options), expected)
    assert not steps


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_has_no_other_weights(whole):
    model = make().float()
    if whole:
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(UnsupportedError, match="'int8', but a compiled model runs without"):
        model.generate(prompts(), max_new_tokens=3, weights="int8")


def test_the_cache_that_generate_returns_holds_no_plan(model, steps):
    out = model.generate(prompts(), max_new_tokens=N, min_new_tokens=N, return_dict_in_generate=True)
    assert steps
    assert out.cache.only.plan is None
    assert isinstance(out.cache.only.latest, DecoderState)
