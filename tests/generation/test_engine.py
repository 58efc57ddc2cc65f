"""`generate` on a stand-in model: any object with the three verbs will do."""

import time
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import decoder, of
from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.decode import request
from unrolled.decode.request import Request, Sampling, random_keys
from unrolled.generation import engine, generate
from unrolled.models.mode import evaluation_mode

V = 13


class History(NamedTuple):
    summary: Tensor


class LeakyMemory(nn.Module):
    """h_t = 0.7 h_{t-1} + embedding of token t; logits = W dropout(tanh h_t)."""

    def __init__(self, start_token: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V, start_token=start_token)
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(V + 1, 8, generator=generator).double())
        self.weight = nn.Parameter(torch.randn(V, 8, generator=generator).double())
        self.dropout = nn.Dropout(0.5)
        self.prefilled: list[torch.Size] = []
        self.stepped: list[int] = []

    def read(self, token: Tensor, summary: Tensor) -> tuple[Tensor, Tensor]:
        summary = 0.7 * summary + self.embedding(token)
        return self.dropout(summary.tanh()) @ self.weight.T, summary

    def init_state(self, batch_size: int) -> History:
        return History(torch.zeros(batch_size, 8, dtype=torch.float64))

    def prefill(
        self, tokens: Tensor, state: History, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, History]:
        self.prefilled.append(tokens.shape)
        padding = torch.zeros_like(tokens).bool() if key_padding_mask is None else key_padding_mask
        summary, logits = state.summary, []
        for token, padded in zip(tokens.T, padding.T, strict=True):
            y, after = self.read(token, summary)
            summary = torch.where(padded.unsqueeze(1), summary, after)
            logits.append(y)
        return torch.stack(logits, 1), History(summary)

    def step(self, token: Tensor, state: History) -> tuple[Tensor, History]:
        self.stepped.append(len(token))
        logits, summary = self.read(token, state.summary)
        return logits, History(summary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.prefill(tokens, self.init_state(len(tokens)))[0]


def as_lists(rows: list[Tensor]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def greedy_by_forward(model: nn.Module, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model.eval()(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=7), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_greedy_is_the_argmax_of_the_whole_forward(prompts: list[list[int]], n: int) -> None:
    model = LeakyMemory()
    assert as_lists(generate(model, prompts, n, temperature=0)) == [
        greedy_by_forward(model, p, n) for p in prompts
    ]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_prompts_are_read_once_and_the_last_token_is_never_stepped(num_samples: int) -> None:
    model = LeakyMemory()
    rows = generate(model, [[1, 2, 3], [4]], 5, num_samples=num_samples, seed=0)
    assert model.prefilled == [(2, 3)]
    assert model.stepped == [2 * num_samples] * 4
    assert [row.shape for row in rows] == [(5,)] * 2 * num_samples
    assert {row.dtype for row in rows} == {torch.int64}


def test_a_seed_gives_a_prompt_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    model = LeakyMemory()
    alone = as_lists(generate(model, [[1, 2]], 20, seed=7))
    others = as_lists(generate(model, [[1, 2], [3, 4, 5, 6, 7], [8]], 20, seed=7, num_samples=2))
    assert others[0] == alone[0]
    assert as_lists(generate(model, torch.tensor([[1, 2]]), 20, seed=7)) == alone
    assert as_lists(generate(model, [[1, 2]], 20, seed=8)) != alone


def test_samples_of_a_prompt_differ_and_so_do_equal_prompts() -> None:
    rows = as_lists(generate(LeakyMemory(), [[1], [1]], 20, seed=0, num_samples=2))
    assert len({tuple(row) for row in rows}) == 4


def test_without_a_seed_each_call_draws_anew_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    assert as_lists(generate(LeakyMemory(), [[1]], 30)) != as_lists(generate(LeakyMemory(), [[1]], 30))
    assert torch.equal(torch.get_rng_state(), before)


def test_stop_ends_rows_one_by_one_and_shrinks_the_batch() -> None:
    model = LeakyMemory()
    free = as_lists(generate(model, [[1], [2], [3]], 40, seed=0))
    model.stepped.clear()
    pair = free[1][4:6]
    stopped = as_lists(generate(model, [[1], [2], [3]], 40, seed=0, stop=[pair, free[2][0]]))
    for row, whole in zip(stopped, free, strict=True):
        assert row == whole[: len(row)]
        ends = [i + 1 for i in range(40) if whole[i] == free[2][0] or whole[max(i - 1, 0) : i + 1] == pair]
        assert len(row) == min(ends, default=40)
    assert len(stopped[2]) == 1
    longest = max(len(row) for row in stopped)
    assert model.stepped == [sum(len(row) > t for row in stopped) for t in range(1, longest)]


def test_one_stop_id_may_be_given_bare() -> None:
    free = generate(LeakyMemory(), [[1]], 10, seed=0)[0].tolist()
    stopped = generate(LeakyMemory(), [[1]], 10, seed=0, stop=free[3])[0].tolist()
    assert stopped == free[: free.index(free[3]) + 1]


def test_on_token_sees_every_token_in_order_and_may_end_its_row() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def on_token(row: int, token: int) -> bool:
        seen[row].append(token)
        return not (row == 0 and len(seen[0]) == 3)

    rows = as_lists(generate(LeakyMemory(), [[1], [2]], 6, seed=0, on_token=on_token))
    assert rows == [seen[0], seen[1]]
    assert [len(row) for row in rows] == [3, 6]


def test_a_start_symbol_stands_before_every_prompt() -> None:
    model = LeakyMemory(start_token=True)
    with_start = as_lists(generate(model, [[V], [V, 3, 4]], 8, temperature=0))
    assert as_lists(generate(model, [[], [3, 4]], 8, temperature=0)) == with_start
    assert with_start == [greedy_by_forward(model, [V], 8), greedy_by_forward(model, [V, 3, 4], 8)]


def test_a_strong_repetition_penalty_draws_no_token_twice_nor_one_of_the_prompt() -> None:
    prompts, n = [[], [0, 1, 2], [5]], V - 3
    model = LeakyMemory(start_token=True)
    for weight in (model.weight, model.embedding.weight):
        weight.data.abs_()  # positive logits, so that a penalised one falls below all others
    rows = as_lists(generate(model, prompts, n, temperature=0, repetition_penalty=1e12))
    for prompt, row in zip(prompts, rows, strict=True):
        assert len(set(prompt + row)) == len(prompt) + n
    assert any(len(set(row)) < n for row in as_lists(generate(model, prompts, n, temperature=0)))


def test_filters_reach_the_draw() -> None:
    greedy = as_lists(generate(LeakyMemory(), [[1]], 20, temperature=0))
    for option in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}):
        assert as_lists(generate(LeakyMemory(), [[1]], 20, seed=0, **option)) == greedy


def test_the_mode_of_a_compiled_model_comes_back() -> None:
    model = LeakyMemory().train()
    compiled = torch.compile(model, backend="eager")
    with evaluation_mode(compiled):
        assert not model.training
    assert model.training


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_while_generating_and_modes_come_back(training: bool) -> None:
    model = LeakyMemory().train(training)
    model.dropout.train()
    rows = as_lists(generate(model, [[1]], 10, temperature=0))
    assert (model.training, model.dropout.training) == (training, True)
    assert rows == [greedy_by_forward(model, [1], 10)]


def test_another_thread_that_ends_first_does_not_turn_dropout_on() -> None:
    model = LeakyMemory()
    alone = as_lists(generate(model, [[1, 2]], 20, temperature=0))
    may_end = Event()
    other = Thread(target=generate, args=(model, [[3]], 1), kwargs={"on_token": lambda *_: may_end.wait(60)})

    def on_token(row: int, token: int) -> None:
        may_end.set()
        other.join()

    other.start()
    while model.training:
        time.sleep(0.001)
    assert as_lists(generate(model, [[1, 2]], 20, temperature=0, on_token=on_token)) == alone
    assert model.training


def test_the_default_device_of_new_tensors_does_not_matter() -> None:
    model = LeakyMemory()
    expected = as_lists(generate(model, [[1], [2, 3]], 5, seed=0, stop=7))
    model.init_state = lambda rows: History(torch.zeros(rows, 8, dtype=torch.float64, device="cpu"))  # type: ignore[method-assign]
    with torch.device("meta"):
        assert as_lists(generate(model, [[1], [2, 3]], 5, seed=0, stop=7)) == expected
        assert generate(model, [[1]], 0)[0].device.type == "cpu"


def test_a_row_without_a_distribution_is_named_by_its_place_among_all() -> None:
    model = LeakyMemory()

    def step(token: Tensor, state: History) -> tuple[Tensor, History]:
        return torch.full((len(token), V), float("nan")), state

    model.step = step  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="logits of row 1 hold NaN"):
        generate(model, [[1], [2]], 5, on_token=lambda row, token: row == 1)


def test_results_are_ordinary_tensors() -> None:
    row = generate(LeakyMemory(), [[1]], 3, seed=0)[0]
    row += 1  # an inference tensor would refuse
    assert not row.requires_grad


def test_nothing_to_do() -> None:
    assert generate(LeakyMemory(), [], 5) == []
    assert [row.shape for row in generate(LeakyMemory(), [[1], [2]], 0)] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": [[1, V]]}, r"prompt_ids\[0\] holds the token id 13, but must be in \[0, 13\)"),
        ({"prompt_ids": [[1], [-1]]}, r"prompt_ids\[1\] holds the token id -1"),
        ({"prompt_ids": [[]]}, r"prompt_ids\[0\] is empty, but this model has no start symbol"),
        ({"prompt_ids": [1, 2]}, r"prompt_ids\[0\] is 1, but must be a sequence of token ids"),
        (
            {"prompt_ids": [[None]]},
            r"prompt_ids\[0\] is \[None\], but must be a sequence of whole numbers of at most 64 bits",
        ),
        (
            {"prompt_ids": [[1, [2]]]},
            r"prompt_ids\[0\] is \[1, \[2\]\], but must be a sequence of whole numbers",
        ),
        (
            {"prompt_ids": [[2**70]]},
            r"prompt_ids\[0\] is \[1180591620717411303424\], but must be a sequence of whole numbers",
        ),
        ({"prompt_ids": ["ab"]}, r"prompt_ids\[0\] is 'ab', but must be a sequence of token ids"),
        ({"prompt_ids": [[0.5]]}, r"is torch.float32 of shape \[1\], but must be whole"),
        ({"prompt_ids": torch.ones(3).long()}, r"prompt_ids has shape \[3\], but must be \[B, T\]"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, but must be an integer"),
        ({"max_new_tokens": float("nan")}, "max_new_tokens is nan, but must be an integer"),
        ({"num_samples": 10**9}, "but must be at most"),
        ({"num_samples": 10**20}, r"but must be below 2\^63"),
        ({"num_samples": True}, "num_samples is True, but must be an integer"),
        ({"temperature": "x"}, "temperature is 'x', but must be a finite number of at least 0"),
        ({"temperature": 10**400}, "temperature is 10*, but must be a finite number of at least 0"),
        (
            {"prompt_ids": [[True]]},
            r"prompt_ids\[0\] is torch.bool of shape \[1\], but must be whole numbers",
        ),
        (
            {"prompt_ids": [torch.tensor(5)]},
            r"prompt_ids\[0\] is tensor\(5\), but must be a sequence of whole numbers",
        ),
        ({"prompt_ids": [[1j]]}, r"prompt_ids\[0\] is torch.complex64 of shape \[1\], but must be whole"),
        (
            {"prompt_ids": [[1]] * 100_001},
            "prompt_ids is 100001 prompts, but must be at most 100000 in one call",
        ),
        ({"top_k": True}, "top_k is True, but must be an integer of at least 1"),
        ({"stop": True}, "stop is True, but must be a token id"),
        ({"stop": [True]}, r"stop is \[True\], but must be a token id"),
        ({"top_k": 1.5}, "top_k is 1.5, but must be an integer of at least 1"),
        ({"top_p": True}, r"top_p is True, but must be in \(0, 1\]"),
        (
            {"repetition_penalty": "x"},
            "repetition_penalty is 'x', but must be a finite number of at least 1e-06",
        ),
        ({"stop": 1.5}, "stop is 1.5, but must be a token id"),
        ({"seed": 1.5}, "seed is 1.5, but must be an integer"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, but must be at least 0"),
        ({"num_samples": 0}, "num_samples is 0, but must be at least 1"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seed": 2**63}, r"seed is 9223372036854775808, but must be below 2\^63"),
        ({"seed": -(2**70)}, r"but must be above -2\^63"),
        ({"stop": [[]]}, "stop holds an empty sequence"),
        ({"stop": V}, r"stop holds \[13\], with a token id outside \[0, 13\)"),
    ],
)
def test_wrong_input_is_refused_before_the_model_runs(options: dict[str, Any], message: str) -> None:
    model = LeakyMemory()
    with pytest.raises(ValueError, match=message):
        generate(model, **{"prompt_ids": [[1]], "max_new_tokens": 3} | options)
    assert not model.prefilled


def test_a_repetition_penalty_does_not_count_padding():
    model = LeakyMemory()
    for weight in (model.weight, model.embedding.weight):
        weight.data.abs_()
    options = {"temperature": 0, "repetition_penalty": 1e12}
    (alone,) = as_lists(generate(model, [[5]], V - 1, **options))
    assert 0 in alone[:-1]  # the id at padding
    assert as_lists(generate(model, [[5], [1, 2, 3]], V - 1, **options))[0] == alone


def test_a_model_that_cannot_run_is_named() -> None:
    with pytest.raises(ValueError, match="model is a NoneType, but must have"):
        generate(None, [[1]], 3)  # type: ignore[arg-type]


def test_keys_are_those_of_seed_sequence() -> None:
    expected = [
        int(np.random.SeedSequence(7, spawn_key=(prompt, sample)).generate_state(1, np.uint64)[0])
        for prompt in range(2)
        for sample in range(3)
    ]
    assert [key % 2**64 for key in random_keys(7, 2, 3).tolist()] == expected
    assert expected[1] == 15529291740490724314


def test_a_request_has_at_most_so_many_rows(monkeypatch) -> None:
    monkeypatch.setattr(request, "MOST_ROWS", 4)
    config = SimpleNamespace(vocab_size=5, start_token=False)
    assert Request.of(config, [[1], [2]], 1, num_samples=2).rows == 4
    with pytest.raises(ValueError, match="num_samples is 3, but must be at most 2 in one call"):
        Request.of(config, [[1], [2]], 1, num_samples=3)


def test_weights_are_refused_where_a_plan_cannot_run_the_model() -> None:
    with pytest.raises(UnsupportedError, match="a plan cannot run aft attention"):
        generate(decoder(**of("aft")), [[1]], 3, weights="int8")
    model = decoder()
    verbs = {name: getattr(model, name) for name in ("config", "init_state", "prefill", "step")}
    with pytest.raises(UnsupportedError, match="weights is 'int8', but a plan cannot run SimpleNamespace"):
        generate(SimpleNamespace(**verbs), [[1]], 3, weights="int8")


def test_logits_of_half_precision_are_filtered_in_double() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    options, seen = Sampling(temperature=0.7, repetition_penalty=1.3), logits > 0
    found = engine.filtered(logits, seen, options)
    assert torch.equal(found, engine.filtered(logits.double(), seen, options))
