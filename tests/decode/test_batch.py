"""Rows of a batch are continued as each would be alone."""

from itertools import pairwise

import pytest
import torch
from planned import MODELS, V, decoder, of

from unrolled.decode import plan
from unrolled.decode.batch import MOST_TOLD, Batch, Drawing
from unrolled.decode.request import Request
from unrolled.generation import engine
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

ROWS = [
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0},
    {"repetition_penalty": 1.5, "min_p": 0.01},
    {"stop": [3, [4, 5]]},
    {"top_p": 0.3},
]


@pytest.mark.parametrize("name", ["linear", "hybrid"])
@torch.no_grad()
def test_rows_have_their_own_options_and_begin_when_they_like(name):
    model = decoder(**MODELS[name])
    p = plan(model)
    batch = Batch(p, torch.empty(len(ROWS) + 1, V))
    requests = [
        Request.of(model.config, [[row + 1, 2]], 20 + row, seed=row, **options)
        for row, options in enumerate(ROWS)
    ]
    for row, request in enumerate(requests):
        [prompt] = request.prompts
        state = p.with_room(p.init_state(1), len(prompt))
        p.read(prompt, torch.zeros_like(prompt), torch.tensor([-1, row]), [state], batch.logits)
        seen = torch.zeros(V, dtype=torch.uint8)
        seen[prompt] = 1
        penalised = request.sampling.repetition_penalty != 1
        key, stops = int(request.keys[0]), request.stops
        drawing = Drawing(request.sampling, key, request.limit, stops, seen if penalised else None)
        batch.start(row, state, drawing)
        batch.draw(3)  # those that began before go on
    while batch.active.any():
        batch.draw(4)
    for row, request in enumerate(requests):
        [expected] = engine.run(model, request)
        assert batch.tokens(row).tolist() == expected.tolist()
    assert batch.length[-1] == 0


@pytest.mark.parametrize("first", [15, 200])
def test_a_row_gets_no_room_for_tokens_that_it_may_not_draw(first):
    p = plan(decoder(**MODELS["softmax"]))
    batch, state = Batch(p, torch.zeros(1, V)), p.with_room(p.init_state(1), 20)
    batch.start(0, state, Drawing(Request.of(p.config, [[1]], 9).sampling, 0, 20, []))
    for most in (first, 200):
        batch.draw(most)
        assert len(batch.tokens(0)) == min(first, 20) or most == 200
        assert batch.states[0].cache.shape == state.cache.shape
    assert len(batch.tokens(0)) == 20


def test_a_row_that_was_ended_begins_again():
    p = plan(decoder())
    batch = Batch(p, torch.zeros(2, V))
    greedy = Request.of(p.config, [[1]], 9, temperature=0).sampling
    batch.start(1, p.init_state(1), Drawing(greedy, 0, 9, []))
    batch.draw(5)
    batch.end(1, 2)
    assert len(batch.tokens(1)) == 2
    assert not batch.active.any()
    batch.draw(5)
    batch.start(1, p.init_state(1), Drawing(greedy, 0, 3, []))
    batch.draw(5)
    assert len(batch.tokens(1)) == 3


def test_a_row_tells_the_logits_that_its_tokens_were_drawn_from():
    p = plan(decoder())
    batch = Batch(p, torch.empty(2, V))
    prompt, greedy = torch.tensor([1, 2, 3]), Request.of(p.config, [[1]], 9, temperature=0).sampling
    for row in (0, 1):
        state = p.init_state(1)
        p.read(prompt, torch.zeros_like(prompt), torch.tensor([-1, -1, row]), [state], batch.logits)
        batch.start(row, state, Drawing(greedy, 0, MOST_TOLD + 2, [], tells=row == 1))
    batch.draw(100)
    assert batch.length.tolist() == [MOST_TOLD, MOST_TOLD]
    drawn = batch.tokens(1)
    expected, _ = p.prefill(torch.cat([prompt, drawn])[None, :-1], p.init_state(1))
    assert torch.equal(batch.told[1], expected[0, 2:])
    batch.draw(100)
    assert torch.equal(batch.told[1][:2].argmax(-1), batch.tokens(1)[-2:])
    assert batch.told[0] is None


def test_a_row_that_cannot_go_on_leaves_the_others():
    p = plan(decoder())
    batch = Batch(p, torch.zeros(3, V))
    batch.logits[1] = float("nan")
    greedy = Request.of(p.config, [[1]], 9, temperature=0).sampling
    for row in range(3):
        batch.start(row, p.init_state(1), Drawing(greedy, 0, 9, []))
    batch.draw(9)
    assert batch.failed() == [1]
    assert "row 1 hold NaN" in batch.reason(1)
    assert batch.length.tolist() == [9, 0, 9]


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@torch.no_grad()
def test_a_steady_plan_gives_the_same_bits_however_many_tokens_are_read_at_once(name, weights):
    p = plan(decoder(**MODELS[name]), weights)
    p.steady = True
    n = p.config.n_positions or 150  # softmax meets keys in parts of 128
    tokens = torch.randint(V, (1, n), generator=torch.Generator().manual_seed(0))
    expected, whole = p.prefill(tokens, p.init_state(1))
    state, pieces = p.init_state(7), []
    for begin, end in pairwise([*(k for k in (0, 1, 2, 5, 64, 65, 129) if k < n), n]):
        logits, state = p.prefill(tokens[:, begin:end].expand(7, -1), state)
        pieces.append(logits[3:4])
    assert torch.equal(torch.cat(pieces, 1), expected)
    assert torch.equal(state.fixed[3:4], whole.fixed)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@torch.no_grad()
def test_no_instruction_set_depends_on_where_a_prompt_is_cut_or_what_is_beside_it(weights, instruction_set):
    # Heads of 20 numbers are whole vectors and a rest; keys are met in parts of 128.
    p = plan(decoder(**of("softmax"), d_model=80), weights)
    p.steady = True
    tokens = torch.randint(V, (1, 300), generator=torch.Generator().manual_seed(0))
    with native.use(instruction_set):
        expected, whole = p.prefill(tokens, p.init_state(1))
        for cuts in ([0, 130, 300], [0, 1, 127, 131, 200, 258, 259, 300]):
            for rows in (1, 2, 3):
                state, pieces = p.init_state(rows), []
                for begin, end in pairwise(cuts):
                    logits, state = p.prefill(tokens[:, begin:end].expand(rows, -1), state)
                    pieces.append(logits[:1])
                assert torch.equal(torch.cat(pieces, 1), expected)
                cut = p.resized(state, 300).cache
                assert torch.equal(cut[:1], p.resized(whole, 300).cache)
