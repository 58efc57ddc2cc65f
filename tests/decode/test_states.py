"""The state of a plan from the state of its model, and back."""

import pytest
import torch
from planned import MODELS, decoder, of, tokens

from unrolled.decode import plan
from unrolled.ops import native
from unrolled.ops.state import leaves, map_tensors

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("read", [1, 9])
@torch.no_grad()
def test_model_and_plan_continue_from_each_other(name, read):
    model, ids = decoder(**MODELS[name]), tokens()
    p, padding = plan(model), torch.zeros(3, read, dtype=torch.bool)
    padding[1, : read // 2] = padding[2, -(read // 3) or read :] = True  # rows of different lengths
    masked = {"key_padding_mask": padding}
    _, of_model = model.prefill(ids[:, :read], model.init_state(3), **masked)
    _, of_plan = p.prefill(ids[:, :read], p.init_state(3), **masked)
    expected, _ = model.prefill(ids[:, read:], of_model)
    found, _ = p.prefill(ids[:, read:], p.from_model(of_model))
    torch.testing.assert_close(found, expected, **CLOSE)
    back = p.to_model(of_plan)
    memory = {x.untyped_storage().data_ptr() for x in of_plan if x.numel()}
    assert memory.isdisjoint(
        x.untyped_storage().data_ptr() for x in leaves(back).values()
    )  # `read` writes there
    torch.testing.assert_close(model.prefill(ids[:, read:], back)[0], expected, **CLOSE)
    steps, state = [], back
    for token in ids.T[read:]:
        logits, state = model.step(token, state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, 1), expected, **CLOSE)


@torch.no_grad()
def test_steps_of_the_model_are_continued_too():
    model, ids = decoder(**MODELS["hybrid"]), tokens(length=100)  # longer than the recent part of a cache
    p, state = plan(model), model.init_state(3)
    for token in ids.T[:80]:
        _, state = model.step(token, state)
    expected, _ = model.prefill(ids[:, 80:], state)
    torch.testing.assert_close(p.prefill(ids[:, 80:], p.from_model(state))[0], expected, **CLOSE)


def test_a_state_of_other_random_features_is_refused():
    model = decoder(**MODELS["rfa"])
    before = plan(model).to_model(plan(model).init_state(1))
    model.stack.layers[1].attention.redraw()
    with pytest.raises(ValueError, match=r"draw of the state is \[0\], but must be \[1\]"):
        plan(model).from_model(before)


def test_states_outlive_a_redraw_of_the_model():
    model, ids = decoder(**MODELS["rfa"]), tokens()
    p = plan(model)
    _, state = p.prefill(ids, p.init_state(3))
    model.stack.layers[0].attention.redraw()
    p.from_model(p.to_model(state))
    with pytest.raises(ValueError, match="redraw"):
        model.step(ids[:, 0], p.to_model(state))


@pytest.mark.parametrize("name", ["linear", "softmax", "window", "convolution", "delta rule"])
def test_a_state_that_records_gradients_is_copied_without_them(name):
    model, ids = decoder(**MODELS[name]), tokens()
    p = plan(model)
    _, state = model.prefill(ids, model.init_state(3))
    assert not any(x.requires_grad for x in p.from_model(state))


@pytest.mark.parametrize(
    "other", [{"n_kv_heads": 1}, {"d_model": 40}, {"attention": "softmax"}, {"n_layers": 1}]
)
@torch.no_grad()
def test_states_of_other_models_are_refused(other):
    _, state = (model := decoder(**other)).prefill(tokens(), model.init_state(3))
    with pytest.raises(ValueError, match="state is not a state of this plan's model"):
        plan(decoder()).from_model(state)


def test_a_state_before_the_first_token():
    model = decoder(**MODELS["hybrid"])
    p = plan(model)
    for rows in (0, 2):
        assert p.from_model(model.init_state(rows)).position.tolist() == [0] * rows
        p.to_model(p.init_state(rows))


def test_a_state_with_fewer_rows_in_a_layer_is_refused():
    model = decoder()
    p, state = plan(model), model.init_state(3)
    one = map_tensors(lambda x: x[:1], state)
    with pytest.raises(ValueError, match="state is not a state of this plan's model"):
        p.from_model(state._replace(layers=one.layers))


def test_a_state_of_another_window_is_refused():
    wide, narrow = (decoder(**of("window", window=window)) for window in (5, 1))
    with pytest.raises(ValueError, match="state is not a state of this plan's model"):
        plan(narrow).from_model(wide.init_state(1))
