"""`generate` on decoders whose state is constant, growing, or both: one loop serves all."""

import pytest
import torch
from planned import decoder

from unrolled.generation import generate
from unrolled.models import Decoder, DecoderConfig

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9]]
KINDS = {
    "linear": {"attention": "linear", "positions": "rotary"},
    "softmax": {"attention": "softmax", "positions": "learned"},
    "hybrid": {"attention": ["linear", "softmax"], "positions": "sinusoidal", "n_kv_heads": 1},
    "mixture": {"attention": "linear", "inputs": "pixels", "head": "logistic_mixture"},
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=11,
        d_model=16,
        n_layers=2,
        n_heads=2,
        max_length=64,
        start_token=True,
        **KINDS[request.param],
    )
    decoder = Decoder(config).double()
    for parameter in decoder.parameters():  # away from the small initial weights, whose logits are all alike
        torch.nn.init.normal_(parameter, std=0.5)
    return decoder.train()


def argmax_loop(model: Decoder, prompt: list[int], n: int) -> list[int]:
    tokens = [model.config.vocab_size, *prompt]
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[-n:]


def test_greedy_is_the_argmax_of_the_whole_forward(model: Decoder) -> None:
    rows = [row.tolist() for row in generate(model, [*PROMPTS, []], 24, temperature=0)]
    model.eval()
    assert rows == [argmax_loop(model, prompt, 24) for prompt in [*PROMPTS, []]]


def test_only_the_logits_after_the_prompts_are_computed(model: Decoder) -> None:
    computed: list[int] = []
    model.head.register_forward_pre_hook(lambda head, inputs: computed.append(inputs[0].numel() // 16))
    generate(model, PROMPTS, 3)
    assert computed == [len(PROMPTS)] * 3


def test_a_prompt_draws_the_same_alone_as_in_a_batch_that_shrinks(model: Decoder) -> None:
    alone = generate(model, PROMPTS[:1], 40, seed=1)[0].tolist()
    seen: dict[int, list[int]] = {}

    def on_token(row: int, token: int) -> bool:
        seen.setdefault(row, []).append(token)
        return row < 2 or len(seen[row]) < row

    rows = [r.tolist() for r in generate(model, PROMPTS, 40, seed=1, num_samples=2, on_token=on_token)]
    assert rows[0] == alone
    assert rows == [seen[row] for row in range(8)]
    assert [len(row) for row in rows] == [40, 40, 2, 3, 4, 5, 6, 7]
    stop = [alone[10:13], alone[20]]
    ends = [t + 1 for t in range(40) if alone[t] == alone[20] or alone[max(t - 2, 0) : t + 1] == alone[10:13]]
    stopped = generate(model, PROMPTS, 40, seed=1, num_samples=2, stop=stop)[0].tolist()
    assert stopped == alone[: ends[0]]


def test_samples_follow_the_distribution_of_the_forward(model: Decoder) -> None:
    n = 2_000
    rows = generate(model, [[1, 2]], 2, num_samples=n, seed=0)
    pairs = torch.stack(rows)
    model.eval()
    start = model.config.vocab_size
    first = model(torch.tensor([[start, 1, 2]]))[0, -1].softmax(-1)
    a = int(first.argmax())
    second = model(torch.tensor([[start, 1, 2, a]]))[0, -1].softmax(-1)
    follows = pairs[pairs[:, 0] == a, 1]
    for tokens, probabilities in ((pairs[:, 0], first), (follows, second)):
        frequencies = torch.bincount(tokens, minlength=start) / len(tokens)
        five_sigma = 5 * (probabilities * (1 - probabilities) / len(tokens)).sqrt() + 1 / len(tokens)
        assert ((frequencies - probabilities).abs() <= five_sigma).all()


def test_learned_positions_are_used_up_to_the_last() -> None:
    model = Decoder(
        DecoderConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=2, max_length=9, start_token=True)
    )
    assert len(generate(model, [[]], 9, seed=0)[0]) == 9
    with pytest.raises(ValueError, match="max_length = 9"):
        generate(model, [[]], 10, seed=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_prompts_may_have_any_type_of_integers(dtype) -> None:
    expected = generate(decoder(), [[1, 2]], 3, seed=0)
    found = generate(decoder(), [torch.tensor([1, 2], dtype=dtype)], 3, seed=0)
    assert torch.equal(found[0], expected[0])
