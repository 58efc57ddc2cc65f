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
    """Memory that is handed out uninitialised holds NaN, which a value left out does not survive."""
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


def in_place(model):
    model.stack.blocks[0].ff.up.weight.mul_(2)


def by_other_storage(model):
    weight = model.stack.blocks[0].ff.up.weight
    weight.data = 2 * weight.data


def by_another_layout_of_its_storage(model):
    weight = model.stack.blocks[0].attention.out_proj.weight
    weight.data = weight.data.mT


def by_another_parameter(model):
    ff = model.stack.blocks[0].ff
    ff.up.weight = nn.Parameter(2 * ff.up.weight)


def by_another_option(model):
    model.stack.blocks[0].ff.activation = "relu"


@pytest.mark.parametrize(
    "change",
    [in_place, by_other_storage, by_another_layout_of_its_storage, by_another_parameter, by_another_option],
)
def test_a_block_may_change_between_steps(change, fusions):
    model = decoder()
    with torch.inference_mode():
        before = logits(model)
    assert fusions == [2] * STEPS
    with torch.no_grad():
        change(model)
    fusions.clear()
    with torch.inference_mode():
        found = logits(model)
    strided = change is by_another_layout_of_its_storage
    assert fusions == ([0, 1] if strided else [2]) * STEPS
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


def replace_a_layer(model):
    model.stack.blocks[0].ff.up = Doubled(32, 48)


def replace_a_norm(model):
    model.stack.blocks[0].ff_norm = nn.LayerNorm(32, eps=0.5)


def become_double(model):
    model.double()


def drop_out(model):
    model.train()


def drop_out_of_blocks_only(model):
    model.stack.blocks[0].dropout.train()


def use_strided_weights(model):
    weight = model.stack.blocks[0].ff.up.weight
    weight.data = weight.data.mT.contiguous().mT


class DoubledLayers(FeedForward):
    def forward(self, x):
        return 2 * super().forward(x)


class OtherNorm(nn.RMSNorm):
    pass


def subclass_a_layer(model):
    model.stack.blocks[0].ff.__class__ = DoubledLayers


def subclass_the_norms(model):
    block = model.stack.blocks[0]
    block.attention_norm, block.ff_norm = OtherNorm(32, eps=1e-5), OtherNorm(32, eps=1e-5)


def replace_a_forward(model):
    up = model.stack.blocks[0].ff.up
    up.forward = lambda x: -nn.functional.linear(x, up.weight, up.bias)


def replace_a_step(model):
    block = model.stack.blocks[0]
    block.step = lambda x, state: (-x, state)


def replace_the_step_of_the_attention(model):
    attention = model.stack.blocks[0].attention
    attention.step = lambda x, state: (-x, state)


def hold_a_bias_as_a_buffer(model):
    up = model.stack.blocks[0].ff.up
    bias = up.bias.detach()
    del up.bias
    up.register_buffer("bias", bias)


def replace_the_dropout(model):
    model.stack.blocks[0].dropout = nn.Identity()
    model.train()


def watch_the_dropout(model):
    dropout = model.stack.blocks[0].dropout = nn.Dropout(0.0)
    dropout.register_forward_hook(lambda _, __, y: 2 * y)


def prune(model):
    ff = model.stack.blocks[0].ff
    ff.up.weight, ff.up.bias = nn.Parameter(ff.up.weight[:16]), nn.Parameter(ff.up.bias[:16])
    ff.down.weight = nn.Parameter(ff.down.weight[:, :20])  # not a whole number of vectors
    ff.up.weight = nn.Parameter(torch.cat([ff.up.weight, ff.up.weight[:4]]))
    ff.up.bias = nn.Parameter(torch.cat([ff.up.bias, ff.up.bias[:4]]))


def drop_the_scale_of_a_norm(model):
    model.stack.blocks[0].ff_norm = nn.LayerNorm(32, elementwise_affine=False)


def drop_the_norms(model):
    block = model.stack.blocks[0]
    block.attention_norm, block.ff_norm = nn.Identity(), nn.Identity()


@pytest.mark.parametrize(
    "change",
    [
        replace_a_layer,
        replace_a_norm,
        become_double,
        drop_out,
        drop_out_of_blocks_only,
        use_strided_weights,
        subclass_a_layer,
        subclass_the_norms,
        replace_a_forward,
        replace_a_step,
        replace_the_step_of_the_attention,
        hold_a_bias_as_a_buffer,
        replace_the_dropout,
        watch_the_dropout,
        prune,
        drop_the_scale_of_a_norm,
        drop_the_norms,
    ],
)
def test_a_block_that_is_another_one_takes_the_layers(change, fusions):
    model = decoder(n_layers=1, dropout=0.5)
    change(model)
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
