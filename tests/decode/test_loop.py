"""The loop in C++ draws the tokens that the engine in Python draws."""

import pytest
import torch
from planned import LENGTH, MODELS, V, decoder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unrolled.decode import Plan, loop, plan
from unrolled.decode.batch import Batch
from unrolled.decode.request import Request
from unrolled.generation import beam_search, engine, generate
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

PROMPTS = [[1, 2, 3], [5], list(range(20))]
OPTIONS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "one token": {"top_k": 1},
    "nucleus": {"top_p": 0.3, "num_samples": 2},
    "nucleus of all": {"top_p": 0.999999},
    "nucleus of a sharp distribution": {"temperature": 0.05, "top_p": 0.999},
    "least": {"min_p": 0.1, "temperature": 2.0},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    "encouraged": {"repetition_penalty": 0.7},
    "forbidden": {"repetition_penalty": 1e6, "num_samples": 2},
    "stops": {"stop": [3, [4, 5]]},
}


def both(model, tokens, prompts=PROMPTS, **options):
    """Draw with the engine in Python and with a plan; return the tokens of both, and what was reported."""
    request = Request.of(model.config, prompts, tokens, seed=3, **options)
    reports = [], []
    expected = engine.run(model, request, lambda *drawn: reports[0].append(drawn))
    found = plan(model).run(request, lambda *drawn: reports[1].append(drawn))
    return expected, found, reports


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_sampling_draws_the_same_tokens(options):
    expected, found, reports = both(decoder(), 1000 if not options else 200, **options)
    assert all(map(torch.equal, expected, found))
    assert len(expected) == 3 * options.get("num_samples", 1)
    assert reports[0] == reports[1]


@pytest.mark.parametrize("name", MODELS)
def test_every_mechanism_draws_the_same_tokens(name):
    model, prompts = decoder(**MODELS[name]), [[]] if name == "pixels" else PROMPTS[:1]
    positions = model.config.n_positions
    expected, found, _ = both(model, 120 if positions is None else positions - 2, prompts, top_p=0.95)
    assert all(map(torch.equal, expected, found))


def test_callbacks_end_rows():
    model = decoder()
    request = Request.of(model.config, PROMPTS, 60, seed=0)

    def report(row, token):
        return None if row else token > 5

    expected, found = engine.run(model, request, report), plan(model).run(request, report)
    assert all(map(torch.equal, expected, found))
    assert len(found[0]) < 60 == len(found[1])


def test_tokens_are_reported_before_a_row_fails_and_a_row_that_has_ended_does_not(monkeypatch):
    monkeypatch.setattr(loop, "BLOCK_SECONDS", 60)  # the last tokens are drawn at once
    model = decoder(positions="learned", max_length=LENGTH)
    request = Request.of(model.config, [[1, 2, 3]], 200, seed=0)
    expected = []
    with pytest.raises(ValueError, match="must have at most"):
        engine.run(model, request, lambda _, token: expected.append(token))
    for most in (1, 5, LENGTH - 2, None):
        tokens = []

        def report(_, token, tokens=tokens, most=most):
            tokens.append(token)
            return len(tokens) != most

        if most is None:
            with pytest.raises(ValueError, match="must have at most"):
                plan(model).run(request, report)
        else:
            assert plan(model).run(request, report)[0].tolist() == tokens
        assert tokens == expected[:most]


def test_the_last_token_needs_no_position():
    model = decoder(positions="learned", max_length=LENGTH)
    expected, found, _ = both(model, LENGTH - 2, [[1, 2, 3]])
    assert torch.equal(expected[0], found[0])
    assert len(found[0]) == LENGTH - 2
    for run in (engine.run, lambda model, request, _: plan(model).run(request)):
        with pytest.raises(ValueError, match=f"has length {LENGTH + 1}, but must have at most"):
            run(model, Request.of(model.config, [[1, 2, 3]], LENGTH - 1), None)
    # A row that stops in time needs no more positions.
    stop = found[0][-2:].tolist()
    expected, found, _ = both(model, 100, [[1, 2, 3]], stop=[stop])
    assert torch.equal(expected[0], found[0])


def test_a_limit_takes_no_memory():
    model = decoder()
    expected, found, _ = both(model, 2**62, stop=list(range(0, V, 9)))
    assert all(map(torch.equal, expected, found))
    assert max(map(len, found)) > 3


def test_logits_that_are_no_distribution_are_refused():
    model = decoder(positions="none")
    with torch.no_grad():
        model.embedding.weight[7] = torch.nan
    for run in (engine.run, lambda model, request, _: plan(model).run(request)):
        with pytest.raises(ValueError, match="logits of row 1 hold NaN"):
            run(model, Request.of(model.config, [[1], [7]], 1), None)


def test_an_interrupt_is_noticed_between_blocks(monkeypatch):
    model, drawn = decoder(), []

    def interrupted(row, token):
        drawn.append(token)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(model).generate([[1]], 10**6, on_token=interrupted)
    assert len(drawn) == 1


@pytest.mark.parametrize(("seconds", "expected"), [(60, [1, 49]), (1e-9, [1] * 50)])
def test_after_one_token_blocks_are_as_long_as_their_time_allows(monkeypatch, seconds, expected):
    monkeypatch.setattr(loop, "BLOCK_SECONDS", seconds)
    asked, draw = [], Batch.draw
    monkeypatch.setattr(Batch, "draw", lambda self, n: (asked.append(n), draw(self, n)))
    plan(decoder()).generate([[1]], 50)
    assert asked == expected


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_generate_makes_a_plan_where_it_pays_off(monkeypatch):
    model, runs, run = decoder(), [], Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *args: (runs.append(self.weights), run(self, *args))[1])
    generate(model, [[1]], engine.PLANNED_TOKENS - 1)
    assert not runs
    generate(model, [[1]], engine.PLANNED_TOKENS)
    generate(model, [[1]], 3, weights="int8")
    generate(plan(model, "bf16"), [[1]], 3)
    generate(decoder(**MODELS["linear"]).double(), [[1]], engine.PLANNED_TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, [[1]], engine.PLANNED_TOKENS)
    with Watching():
        generate(model, [[1]], engine.PLANNED_TOKENS)
    assert runs == ["fp32", "int8", "bf16"]


def test_generate_sees_a_model_that_changed():
    model = decoder()
    generate(model, [[1]], 40, seed=0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.3)
    with torch.no_grad():
        expected = engine.run(model, Request.of(model.config, [[1]], 40, seed=0), None)
    assert torch.equal(generate(model, [[1]], 40, seed=0)[0], expected[0])


def test_a_plan_searches_beams():
    model, ids = decoder(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    p = plan(model)
    with torch.no_grad():
        of_model = model.prefill(ids, model.init_state(2))
    of_plan = p.prefill(ids, p.init_state(2))
    found = [
        beam_search(m, y[:, -1], s, max_new_tokens=12) for m, (y, s) in ((model, of_model), (p, of_plan))
    ]
    for expected, hypotheses in zip(*found, strict=True):
        assert [h.tokens.tolist() for h in expected] == [h.tokens.tolist() for h in hypotheses]


def test_nothing_to_do():
    p = plan(decoder())
    assert p.generate([], 5) == []
    assert [len(row) for row in p.generate([[1], [2]], 0)] == [0, 0]


def test_a_big_batch_is_a_batch():
    model = decoder(**MODELS["hybrid"])
    prompts = [[i % V] * (1 + i % 3) for i in range(70)]  # more than the kernel reads at a time
    expected, found, _ = both(model, 20, prompts, repetition_penalty=1.2)
    assert all(map(torch.equal, expected, found))


def test_top_k_may_be_any_number():
    p = plan(decoder())
    assert torch.equal(*(p.generate([[1]], 9, seed=0, top_k=k)[0] for k in (None, 10**20)))
