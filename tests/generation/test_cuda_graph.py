"""Steps that are replayed from a CUDA graph; `tests/test_cuda.py` records real graphs."""

from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from unrolled.generation import cuda_graph, engine, generate
from unrolled.generation.cuda_graph import Memory, Step, recordable
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import map_tensors

CUDA = torch.device("cuda")


@pytest.fixture
def replays(monkeypatch):
    """Replace the graph by a call of what it would record, in the same memory; return the rows of each."""
    rows = []

    def begin(self, tokens, draws, seen, state):
        memory = Memory(tokens.clone(), draws.clone(), seen, map_tensors(Tensor.clone, state))

        def replay():
            rows.append(len(tokens))
            self._advance_in_place(memory)

        self._graph, self._memory = SimpleNamespace(replay=replay), memory

    monkeypatch.setattr(Step, "_begin", begin)
    monkeypatch.setattr(engine, "recordable", lambda *_: True)
    monkeypatch.setattr(engine, "unasked", lambda: False)  # no plan
    return rows


def decoder(**changes):
    torch.manual_seed(0)
    config = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "n_heads": 2, "positions": "none"} | changes
    return Decoder(DecoderConfig(**config)).eval()


@pytest.mark.parametrize("attention", ["linear", "delta_net", "window", "softmax", "aft"])
def test_rows_are_those_of_launched_steps(attention, replays, monkeypatch):
    model = decoder(attention=attention)
    prompts = torch.randint(20, (5, 4))
    asked = {"stop": [7, [3]], "top_k": 12, "repetition_penalty": 1.3, "num_samples": 2, "seed": 5}
    found = generate(model, prompts, 40, **asked)
    assert len({len(x) for x in found}) > 3  # rows end at different steps
    states_grow = attention in ("softmax", "aft")
    assert bool(replays) != states_grow
    assert all(2 * later <= earlier for earlier, later in pairwise(replays) if later < earlier)
    replays.clear()
    monkeypatch.setattr(engine, "recordable", lambda *_: False)
    expected = generate(model, prompts, 40, **asked)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert not replays


def test_few_tokens_are_launched(replays):
    generate(decoder(), torch.zeros(1, 3, dtype=torch.long), engine.RECORDED_TOKENS - 1, seed=0)
    assert not replays


def test_rows_without_a_distribution_are_found(replays):
    model = decoder()
    step = model.step

    def overflow(tokens, state):
        logits, state = step(tokens, state)
        return logits.masked_fill((tokens == 5).unsqueeze(1), float("nan")), state

    model.step = overflow
    with pytest.raises(ValueError, match="logits of row 0 hold NaN"):
        generate(model, torch.zeros(1, 3, dtype=torch.long), 200, seed=0)
    # A row that has ended is stepped on until half of all rows have.
    ended = generate(
        model, torch.zeros(3, 3, dtype=torch.long), 200, seed=0, on_token=lambda row, token: token != 5
    )
    assert all(5 not in x[:-1].tolist() for x in ended)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_a_state_may_hold_parts_of_the_state_before():
    state = Pair(torch.arange(3), torch.arange(3, 6))
    cuda_graph._overwrite(state, Pair(state.second, state.first))
    assert state.first.tolist() == [3, 4, 5]
    assert state.second.tolist() == [0, 1, 2]


class Own(nn.Module):
    pass


def test_code_of_the_user_is_never_recorded(monkeypatch):
    assert recordable(decoder(), CUDA)
    assert not recordable(decoder(), torch.device("cpu"))
    assert not recordable(object(), CUDA)
    hooked, replaced, extended = decoder(), decoder(), decoder()
    hooked.head.register_forward_hook(lambda *_: None)
    replaced.step = lambda *_: None
    extended.own = Own()
    assert not any(recordable(x, CUDA) for x in (hooked, replaced, extended))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert not recordable(decoder(), CUDA)


def test_a_graph_keeps_rows_that_have_ended_until_they_are_half() -> None:
    step = Step(lambda *_: None, record=True)  # type: ignore[arg-type,return-value]
    assert [step.drops_rows(ended, 4) for ended in (0, 1)] == [False, True]
    step._graph = object()  # type: ignore[assignment]
    assert [step.drops_rows(ended, 4) for ended in range(4)] == [False, False, True, True]
