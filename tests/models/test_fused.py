"""A step of many blocks in one kernel: equal to the layers one after the other, and when those run instead."""

import itertools

import pytest
import torch
from torch import nn

from unrolled.models import Decoder, DecoderConfig, fused
from unrolled.models.blocks import Block, FeedForward
from unrolled.ops import native
from unrolled.ops.dispatch import prefer

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

STEPS = 4


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill uninitialised memory with NaN, so that a value that is not written shows up."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fusions(monkeypatch):
    """Record how many blocks the kernel computed, each time that it was asked to."""
    found, step = [], fused.step

    def record(*arguments):
        x, done = step(*arguments)
        found.append(len(done))
        return x, done

    monkeypatch.setattr(fused, "step", record)
    return found


def decoder(**options):
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "max_length": 64}
    model = Decoder(DecoderConfig(vocab_size=11, **(shape | options))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def logits(model, rows=2):
    torch.manual_seed(1)
    state, found = model.init_state(rows), []
    for token in torch.randint(11, (STEPS, rows)):
        y, state = model.step(token, state)
        found.append(y)
    return torch.stack(found)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize(
    ("norm", "norm_type"), [*itertools.product(["pre", "post"], ["layernorm", "rmsnorm"])]
)
def test_it_equals_the_layers_one_after_the_other(norm, norm_type, instruction_set, fusions):
    activations, rows_of = ("gelu", "relu", "swiglu"), (1, 3, 12)
    feature_maps = itertools.cycle(["elu", "relu", "squared_relu", "elu"])
    for (activation, rows), feature_map in zip(
        itertools.product(activations, rows_of), feature_maps, strict=False
    ):
        model = decoder(
            n_layers=1,
            norm=norm,
            norm_type=norm_type,
            activation=activation,
            n_kv_heads=2 if rows == 3 else 4,
            attention_options={"linear": {"feature_map": feature_map}},
        )
        with torch.inference_mode():
            with native.use(instruction_set):
                found = logits(model, rows)
            with prefer("plain"):
                plain, exact = logits(model, rows), logits(model.double(), rows)
        bound = 4 * (plain - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (found - exact).abs().max() <= bound, (activation, feature_map, rows)
    assert sum(fusions) == len(fusions) // 3 == STEPS * 9


def test_a_state_is_never_changed(fusions):
    model, token = decoder(), torch.tensor([3])
    with torch.inference_mode():
        _, state = model.step(token, model.init_state(1))
        before = [x.clone() for layer in state.layers for x in layer]
        model.step(token, state)
    assert fusions == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(before, (x for s in state.layers for x in s), strict=True))


def test_blocks_beside_others_are_run_together(fusions):
    model = decoder(n_layers=4, attention=["linear", "softmax", "linear", "linear"])
    with torch.inference_mode():
        found = logits(model)
        asked = list(fusions)
        with prefer("plain"):
            torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
    assert asked == [1, 0, 2] * STEPS


def test_only_blocks_with_the_norms_of_the_kernel_run_in_it(fusions):
    model = decoder(n_layers=4, norm=["pre", "res_post", "post", "pre"], bias=False)
    with torch.inference_mode():
        found = logits(model)
        asked = list(fusions)
        with prefer("plain"):
            torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
    assert asked == [1, 0, 2] * STEPS


STRIDED = "another layout of its storage"
CHANGES = {
    "in place": lambda block: block.ff.up.weight.mul_(2),
    "other storage": lambda block: setattr(block.ff.up.weight, "data", 2 * block.ff.up.weight.data),
    "another parameter": lambda block: setattr(block.ff.up, "weight", nn.Parameter(2 * block.ff.up.weight)),
    "another option": lambda block: setattr(block.ff, "activation", "relu"),
    STRIDED: lambda block: setattr(block.attention.out_proj.weight, "data", block.attention.out_proj.weight.data.mT),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_may_change_between_steps(change, fusions):
    model = decoder()
    with torch.inference_mode():
        before = logits(model)
    assert fusions == [2] * STEPS
    with torch.no_grad():
        CHANGES[change](model.stack.blocks[0])
    fusions.clear()
    with torch.inference_mode():
        found = logits(model)
    assert fusions == ([0, 1] if change == STRIDED else [2]) * STEPS
    with torch.inference_mode(), prefer("plain"):
        torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, rtol=1e-3)


def test_hooks_see_every_layer(fusions):
    model, seen = decoder(), []
    for block in model.stack.blocks:
        block.ff.up.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        logits(model)
    assert len(seen) == 2 * STEPS
    assert not any(fusions)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledLayers(FeedForward):
    def forward(self, x):
        return 2 * super().forward(x)


class OtherNorm(nn.RMSNorm):
    pass


def replace_a_forward(block):
    up = block.ff.up
    up.forward = lambda x: -nn.functional.linear(x, up.weight, up.bias)


def hold_a_bias_as_a_buffer(block):
    bias = block.ff.up.bias.detach()
    del block.ff.up.bias
    block.ff.up.register_buffer("bias", bias)


def replace_the_dropout(block):
    block.dropout = nn.Identity()
    block.train()


def watch_the_dropout(block):
    block.dropout = nn.Dropout(0.0)
    block.dropout.register_forward_hook(lambda _, __, y: 2 * y)


def prune(block):
    """Leave a width that is not a whole number of vectors."""
    up, down = block.ff.up, block.ff.down
    up.weight, up.bias = nn.Parameter(up.weight[:20]), nn.Parameter(up.bias[:20])
    down.weight = nn.Parameter(down.weight[:, :20])


def use_norms(make):
    def change(block):
        block.attention_norm, block.ff_norm = make(), make()

    return change


NEGATED = lambda x, state: (-x, state)  # noqa: E731
REPLACED = {
    "a layer": lambda block: setattr(block.ff, "up", Doubled(32, 48)),
    "a layer's class": lambda block: setattr(block.ff, "__class__", DoubledLayers),
    "a norm": lambda block: setattr(block, "ff_norm", nn.LayerNorm(32, eps=0.5)),
    "a norm without a scale": lambda block: setattr(block, "ff_norm", nn.LayerNorm(32, elementwise_affine=False)),
    "the norms' class": use_norms(lambda: OtherNorm(32, eps=1e-5)),
    "no norms": use_norms(nn.Identity),
    "the dtype": lambda block: block.double(),
    "strided weights": lambda block: setattr(block.ff.up.weight, "data", block.ff.up.weight.data.mT.contiguous().mT),
    "active dropout": lambda block: block.train(),
    "active dropout between layers": lambda block: block.dropout.train(),
    "a dropout of another class": replace_the_dropout,
    "a dropout with a hook": watch_the_dropout,
    "a forward": replace_a_forward,
    "a step": lambda block: setattr(block, "step", NEGATED),
    "the attention's step": lambda block: setattr(block.attention, "step", NEGATED),
    "a bias in a buffer": hold_a_bias_as_a_buffer,
    "pruned layers": prune,
}  # fmt: skip


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_a_block_that_is_another_one_takes_the_layers(change, fusions):
    model = decoder(n_layers=1, dropout=0.5)
    change(model if change is REPLACED["the dtype"] else model.stack.blocks[0])
    with torch.inference_mode():
        torch.manual_seed(2)
        found = logits(model)
        with prefer("plain"):
            torch.manual_seed(2)
            expected = logits(model)
    assert not any(fusions)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "rotary"},
        {"activation": "gelu_tanh"},
        {"attention": "softmax"},
        {"d_model": 24},
        {"attention_options": {"linear": {"feature_map": "polynomial"}}},
        {"attention_options": {"linear": {"feature_map": "t2r"}}},
        {"attention_options": {"linear": {"feature_map": "cosformer"}}},
        {"attention_options": {"linear": {"normalizer": "rms"}}},
    ],
)
def test_other_blocks_take_the_layers(options, fusions):
    model = decoder(**options)
    with torch.inference_mode():
        found = logits(model)
        with prefer("plain"):
            torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
    assert not any(fusions)


def test_a_step_that_all_blocks_get_is_called(fusions, monkeypatch):
    model, step, seen = decoder(), Block.step, []

    def watched(block, x, state):
        seen.append(block)
        return step(block, x, state)

    monkeypatch.setattr(Block, "step", watched)
    with torch.inference_mode():
        logits(model)
    assert len(seen) == 2 * STEPS
    assert not any(fusions)


def test_another_number_of_states_is_refused():
    stack = decoder().stack
    states = stack.init_state(2)
    for wrong in (states[:1], (*states, states[0])):
        with pytest.raises(ValueError, match=f"states has {len(wrong)} entries, but must have 2"):
            stack.step(torch.zeros(2, 32), wrong)


def test_gradients_take_the_layers(fusions):
    model = decoder()
    logits(model).sum().backward()
    assert not any(fusions)
    assert all(x.grad is not None for x in model.stack.parameters())


def test_a_state_of_other_sizes_is_refused():
    model = decoder()
    state = model.init_state(2)
    wrong = state.layers[0]._replace(kv=torch.zeros(2, 4, 8, 7))
    with torch.inference_mode(), pytest.raises(ValueError, match=r"state\.kv is torch.float32"):
        model.step(torch.tensor([1, 2]), state._replace(layers=(wrong, state.layers[1])))
