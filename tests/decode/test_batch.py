"""Rows of a batch are continued as each would be alone."""

import pytest
import torch
from planned import MODELS, V, decoder

from unrolled.decode import plan
from unrolled.decode.batch import Batch
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
    batch = Batch(p, p.init_state(len(ROWS) + 1), torch.empty(len(ROWS) + 1, V))
    requests = [
        Request.of(model.config, [[row + 1, 2]], 20 + row, seed=row, **options)
        for row, options in enumerate(ROWS)
    ]
    for row, request in enumerate(requests):
        [prompt] = request.prompts
        batch.state = p.with_room(batch.state, len(prompt))
        places = torch.tensor([-1, row])
        p.read(prompt, torch.full_like(prompt, row), places, batch.state, batch.logits)
        seen = torch.zeros(V, dtype=torch.uint8)
        seen[prompt] = 1
        penalised = request.sampling.repetition_penalty != 1
        key, stops = int(request.keys[0]), request.stops
        batch.start(row, request.sampling, key, request.limit, stops, seen if penalised else None)
        batch.draw(3)  # those that began before go on
    while batch.active.any():
        batch.draw(4)
    for row, request in enumerate(requests):
        [expected] = engine.run(model, request)
        assert batch.tokens(row).tolist() == expected.tolist()
    assert batch.length[-1] == 0


def test_a_row_that_was_ended_begins_again():
    p = plan(decoder())
    batch = Batch(p, p.init_state(2), torch.zeros(2, V))
    greedy = Request.of(p.config, [[1]], 9, temperature=0).sampling
    batch.start(1, greedy, 0, 9, [])
    batch.draw(5)
    batch.end(1, 2)
    assert len(batch.tokens(1)) == 2
    assert not batch.active.any()
    batch.draw(5)
    batch.start(1, greedy, 0, 3, [])
    batch.draw(5)
    assert len(batch.tokens(1)) == 3
