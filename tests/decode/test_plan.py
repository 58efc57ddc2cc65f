"""Plans equal their models, and refuse what they cannot run."""

import copy
import errno
import gc
import mmap
import pickle
import platform

import pytest
import torch
from defaults import default_dtype
from planned import LENGTH, MODELS, V, decoder, linear, of, rounds_inputs_to_bf16, tokens
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.decode import plan
from unrolled.decode.packing import PACKINGS, TILE, rounded
from unrolled.decode.plan import unasked
from unrolled.decode.program import MOST_POSITIONS
from unrolled.generation import generate
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.models.blocks import FeedForward
from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.state import leaves

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


def stepped(model, ids):
    """Logits of the model, one token at a time."""
    state, found = model.init_state(len(ids)), []
    for token in ids.T:
        logits, state = model.step(token, state)
        found.append(logits)
    return torch.stack(found, 1)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_it_equals_the_model(name, instruction_set):
    model, ids = decoder(**MODELS[name]), tokens()
    found = plan(model)
    with native.use(instruction_set):
        state, steps = found.init_state(3), []
        for token in ids.T[:4]:
            logits, state = found.step(token, state)
            steps.append(logits)
        rest, after = found.prefill(ids[:, 4:], state)
    assert after.position.tolist() == [LENGTH] * 3
    single = torch.stack([model(ids), stepped(model, ids)])
    exact = model.double()(ids)
    bound = 4 * (single - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (torch.cat([torch.stack(steps, 1), rest], 1) - exact).abs().max() <= bound


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("name", ["exp", "hedgehog"])
@torch.no_grad()
def test_large_exponents_are_clamped_as_in_the_model(name, instruction_set):
    model, ids = decoder(**linear(feature_map=name), positions="none"), tokens()
    for block in model.stack.blocks:
        block.attention.qkv_proj.weight[:64] *= 100  # queries and keys
    p = plan(model)
    with native.use(instruction_set):
        found, _ = p.prefill(ids, p.init_state(3))
    torch.testing.assert_close(found.double(), model.double()(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@torch.no_grad()
def test_the_first_keys_of_averages_may_be_far_below_zero(instruction_set):
    model, ids = decoder(**MODELS["rwkv4"]), tokens()
    for block in model.stack.blocks:
        block.attention.qkv_proj.bias[32:64] -= 300  # keys, whose exponentials are 0 in fp32
    p = plan(model)
    with native.use(instruction_set):
        found, _ = p.prefill(ids, p.init_state(3))
    from_plan, _ = model.prefill(ids, p.to_model(p.init_state(3)))
    expected = model.double()(ids)
    for each in (found, from_plan):
        torch.testing.assert_close(each.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "name",
    ["linear", "hybrid", "delta rule, gated", "rwkv4", "rwkv7", "odd widths", "pixels", "tied embeddings"],
)
@torch.no_grad()
def test_rounded_weights_are_those_of_a_rounded_model(name, weights):
    model, ids = decoder(**MODELS[name]), tokens()
    found, _ = (p := plan(model, weights)).prefill(ids, p.init_state(3))
    before, halved = model(ids), weights == "bf16" and rounds_inputs_to_bf16()
    if isinstance(model.embedding, nn.Embedding):
        model.embedding.weight.copy_(rounded(model.embedding.weight, "bf16"))
    if model.config.tie_embeddings:  # as a matrix of the head, the table is rounded further
        model.head.project = nn.Linear(32, V, bias=False)
        model.head.project.weight.copy_(model.embedding.weight)
    for matrix in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        fine = weights == "int4" and (
            matrix is getattr(model.head, "project", None) or len(matrix.weight) < TILE
        )
        matrix.weight.copy_(rounded(matrix.weight, "int8" if fine else weights))
        if halved:
            matrix.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16().float())
    expected = model(ids)
    # Where inputs are rounded too, their last bits decide to which side.
    error = {"bf16": 1e-3 if halved else 1e-5, "int8": 1e-3, "int4": 0.2}[weights]
    difference = (found - expected).abs().max()
    assert difference <= error * expected.abs().max()
    assert halved or weights == "int4" or difference <= (before - expected).abs().max() / 4


@pytest.mark.parametrize("name", ["hybrid", "rwkv4", "rwkv7", "pixels", "softmax"])
@torch.no_grad()
def test_padding_is_left_out_wherever_it_is(name):
    p, ids = plan(decoder(**MODELS[name])), tokens()
    padding = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    logits, after = p.prefill(ids, p.init_state(3), key_padding_mask=padding)
    logits, after = p.prefill(ids[:, :2], after)
    for row in range(3):
        alone, _ = p.prefill(torch.cat([ids[row][~padding[row]], ids[row, :2]])[None], p.init_state(1))
        torch.testing.assert_close(logits[row], alone[0, -2:], rtol=1e-5, atol=1e-5)
        assert int(after.position[row]) == (~padding[row]).sum() + 2


@pytest.mark.parametrize("kept", [1, 4, 50])
def test_the_logits_that_are_kept_are_those_of_the_last_positions(kept):
    p, ids = plan(decoder(**MODELS["hybrid"])), tokens()
    padding = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    expected, after = p.prefill(ids, p.init_state(3), key_padding_mask=padding)
    found, state = p.prefill(ids, p.init_state(3), key_padding_mask=padding, logits_to_keep=kept)
    torch.testing.assert_close(found, expected[:, -kept:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, after, rtol=0, atol=0)


def test_a_state_is_a_value():
    p = plan(decoder(**MODELS["hybrid"]))
    _, state = p.prefill(tokens(), p.init_state(3))
    before = {name: x.clone() for name, x in leaves(state).items()}
    first, _ = p.step(torch.tensor([1, 2, 3]), state)
    p.prefill(tokens(), state)
    again, _ = p.step(torch.tensor([1, 2, 3]), state)
    assert torch.equal(first, again)
    assert all(torch.equal(before[name], x) for name, x in leaves(state).items())


@torch.no_grad()
def test_a_step_in_place_takes_the_memory_of_the_state():
    p, ids = plan(decoder(**MODELS["hybrid"])), tokens(length=40)
    kept = mine = p.init_state(3)
    place = mine.fixed.data_ptr()
    for token in ids.T:
        expected, kept = p.step(token, kept)
        found, mine = p.step(token, mine, in_place=True)
        assert torch.equal(found, expected)
    assert mine.fixed.data_ptr() == place != kept.fixed.data_ptr()


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_no_token_and_no_row_are_read(shape):
    p = plan(decoder(**MODELS["hybrid"]))
    logits, state = p.prefill(torch.zeros(shape, dtype=torch.long), p.init_state(shape[0]))
    assert logits.shape == (*shape, V)
    assert len(state.position) == shape[0]
    assert not state.position.any()


def test_a_long_prompt_is_read_in_chunks():
    model, ids = decoder(**MODELS["hybrid"]), tokens(rows=2, length=150)
    p = plan(model)
    with torch.no_grad():
        torch.testing.assert_close(p.prefill(ids, p.init_state(2))[0], model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@torch.no_grad()
def test_softmax_keeps_the_largest_score_from_part_to_part(instruction_set):
    # Heads of 20 numbers are whole vectors and a rest.
    model = decoder(**of("softmax"), d_model=80, n_kv_heads=2)
    for block in model.stack.blocks:
        block.attention.qkv_proj.weight.mul_(4)  # so that the largest score grows late, and the others vanish
    ids = tokens(rows=1, length=400)
    p, exact = plan(model), model(ids)
    with native.use(instruction_set):
        found, state = p.prefill(ids[:, :330], p.init_state(1))
        rest, _ = p.prefill(ids[:, 330:], state)
    error = (exact - (exact := model.double()(ids))).abs().max()
    assert (torch.cat([found, rest], 1) - exact).abs().max() <= 4 * error + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("name", ["softmax", "window", "linear"])
@torch.no_grad()
def test_a_token_reaches_no_earlier_one(name, instruction_set):
    model, ids = decoder(**MODELS[name] | {"d_model": 64}), tokens(rows=1, length=150)
    model.embedding.weight[V - 1] = torch.nan
    ids %= V - 1
    p = plan(model)
    with native.use(instruction_set):
        before, _ = p.prefill(ids, p.init_state(1))
        ids[0, 140] = V - 1
        after, _ = p.prefill(ids, p.init_state(1))
    assert torch.equal(before[:, :140], after[:, :140])
    assert after[:, 140].isnan().all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors take no longer for such numbers")
@torch.no_grad()
def test_a_state_that_decays_does_not_stay_subnormal():
    model, smallest = decoder(**MODELS["retention"]), torch.finfo(torch.float32).tiny
    for block in model.stack.blocks:
        block.attention.qkv_proj.weight.zero_()
        block.attention.qkv_proj.bias.zero_()
    p = plan(model)
    state = p.init_state(1)
    state = state._replace(fixed=torch.full_like(state.fixed, smallest))
    _, after = p.step(torch.tensor([1]), state)
    assert not after.fixed.any()


def test_threads_are_those_of_torch_at_each_call():
    p, before = plan(decoder(**MODELS["hybrid"])), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            found.append(p.prefill(tokens(), p.init_state(3))[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_plan_is_a_snapshot():
    model, ids = decoder(), tokens()
    p = plan(model)
    before, _ = p.prefill(ids, p.init_state(3))
    with torch.no_grad():
        model.stack.blocks[0].ff.up.weight.mul_(2)
        model.embedding.weight.data = torch.zeros(V, 32)
    model.to("meta")
    assert torch.equal(p.prefill(ids, p.init_state(3))[0], before)


def test_a_copy_of_a_plan_is_a_plan_of_its_own_and_no_plan_is_pickled():
    p, ids = plan(decoder()), tokens()
    expected, _ = p.prefill(ids, p.init_state(3))
    copies = [copy.deepcopy(p), copy.copy(p)]
    with pytest.raises(TypeError, match="a plan cannot be pickled: save it, or plan the model again"):
        pickle.dumps(p)
    p.steady = True
    del p
    gc.collect()
    for copied in copies:
        assert torch.equal(copied.prefill(ids, copied.init_state(3))[0], expected)
        assert not copied.steady


def test_weights_of_half_precision_are_widened():
    model = decoder().bfloat16()
    p = plan(model)
    with torch.no_grad():
        expected = model.float()(tokens())
    torch.testing.assert_close(p.prefill(tokens(), p.init_state(3))[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", PACKINGS)
def test_weights_may_have_any_strides(weights):
    model, moved = (decoder(**MODELS["hybrid"] | {"d_model": 64, "d_ff": 128}) for _ in range(2))
    for module in moved.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
    expected, found = ((p := plan(x, weights)).prefill(tokens(), p.init_state(3))[0] for x in (model, moved))
    assert torch.equal(found, expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has such pages")
def test_linux_may_refuse_large_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    model = decoder()
    (expected,) = plan(model).generate([[1]], 5, seed=0)
    monkeypatch.setattr(mmap, "mmap", Refusing)
    (found,) = plan(model).generate([[1]], 5, seed=0)
    assert torch.equal(found, expected)


class Doubled(FeedForward):
    def forward(self, x):
        return 2 * super().forward(x)


def hook(model):
    model.stack.blocks[1].ff.up.register_forward_hook(lambda *_: None)


def replace_a_forward(model):
    model.stack.blocks[0].ff.forward = lambda x: x


def replace_a_feature_map(model):
    model.stack.blocks[1].attention.feature_map.phi = lambda x: x.square() + 0.1


def subclassed(path):
    def change(model):
        module = model.get_submodule(path)
        module.__class__ = type("Own", (type(module),), {})

    return change


def replace_the_map_of_keys(model):
    model.stack.blocks[1].attention.feature_map.keys.phi = lambda x: x.square() + 0.1


UNSUPPORTED = {
    "dropout": ({}, subclassed("dropout"), "run Own"),
    "dropout of a block": ({}, subclassed("stack.blocks.0.dropout"), "run Own"),
    "positions": ({}, subclassed("positions"), "run Own"),
    "norm of heads": (of("retention"), subclassed("stack.blocks.0.attention.head_norm"), "run Own"),
    "norm of queries": (
        of("softmax", qk_norm="head"),
        subclassed("stack.blocks.0.attention.q_norm"),
        "run Own",
    ),
    "both directions": (
        {},
        lambda m: setattr(m.stack.blocks[0].attention, "causal", False),
        "linear attention",
    ),
    "map of keys": (
        linear(feature_map="t2r") | {"n_kv_heads": 2},
        replace_the_map_of_keys,
        "the feature map QueryKeyMap",
    ),
    "many points": (
        {"positions": "axial", "axial_shape": [257, 256]},
        None,
        "with 65792 points, more than 65536",
    ),
    "mechanism": (of("aft"), None, "aft attention"),
    "dilated window": (of("window", window=3, dilation=2), None, r"dilation \(2, 2, 2, 2\)"),
    "reversible": ({"reversible": True}, None, "ReversibleStack"),
    "a class of its own": ({}, lambda m: setattr(m.stack.blocks[0].ff, "__class__", Doubled), "run Doubled"),
    "a norm": ({}, lambda m: setattr(m.stack, "norm", nn.BatchNorm1d(32)), "run BatchNorm1d"),
    "fp64": ({}, lambda m: m.double(), r"embedding.weight, which is torch.float64 on cpu"),
    "device": ({}, lambda m: m.to("meta"), "on meta"),
    "hook": ({}, hook, "stack.blocks.1.ff.up, which has hooks"),
    "forward": ({}, replace_a_forward, "stack.blocks.0.ff, which has hooks or a forward of its own"),
    "feature map": ({}, replace_a_feature_map, "the feature map Elu"),
    "parametrized": (
        {},
        lambda m: nn.utils.parametrizations.weight_norm(m.stack.blocks[0].ff.up),
        "run ParametrizedLinear",
    ),
}


def test_a_compiled_model_is_to_be_planned_before_it_is_compiled():
    with pytest.raises(UnsupportedError, match=r"plan the model before torch\.compile"):
        plan(torch.compile(decoder(), backend="eager"))


@pytest.mark.parametrize(("options", "change", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_it_says_what_it_cannot_run(options, change, reason):
    model = decoder(**options)
    if change is not None:
        change(model)
    with pytest.raises(UnsupportedError, match=reason):
        plan(model)


def test_a_hook_of_all_modules_is_called_by_none_of_a_plan():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match="the model, which has hooks"):
            plan(decoder())
    finally:
        hook.remove()


def test_planning_changes_no_weight():
    model, ids = decoder(), tokens()
    model.embedding.max_norm = 0.5
    before = model.embedding.weight.clone()
    p = plan(model)
    assert torch.equal(model.embedding.weight, before)
    with torch.no_grad():
        torch.testing.assert_close(p.prefill(ids, p.init_state(3))[0], model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["hybrid", "delta rule, gated", "rwkv4", "rwkv7", "learned positions", "map taylor", "pixels"]
)
def test_the_default_type_and_device_of_new_tensors_do_not_matter(name):
    model, ids = decoder(**MODELS[name]), tokens()
    expected, state = plan(model).prefill(ids, plan(model).init_state(3))
    drawn = plan(model).generate(ids[:, :5], 4, seed=0)
    for default, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        with default_dtype(default), torch.device(device):
            p = plan(model)
            found, after = p.prefill(ids, p.init_state(3))
            again = p.generate(ids[:, :5], 4, seed=0)
        assert torch.equal(found, expected)
        assert all(map(torch.equal, after, state))
        assert all(map(torch.equal, again, drawn))


def test_weights_of_another_form_than_that_of_the_plan_are_refused():
    p = plan(decoder(), "int8")
    assert torch.equal(generate(p, [[1]], 3, seed=0, weights="int8")[0], generate(p, [[1]], 3, seed=0)[0])
    with pytest.raises(ValueError, match="weights is 'int4', but must be 'int8', as in the plan"):
        generate(p, [[1]], 3, weights="int4")


def test_other_models_are_refused():
    with pytest.raises(UnsupportedError, match="cannot run Encoder"):
        plan(Encoder(EncoderConfig(vocab_size=5, d_model=8, n_heads=2, n_classes=3)))


def test_wrong_input_is_one_sentence():
    model = decoder(**MODELS["learned positions"])
    with pytest.raises(ValueError, match="weights is 'int2', but must be one of fp32, bf16, int8, int4"):
        plan(model, "int2")
    with pytest.raises(ValueError, match=r"weights is \['int8'\], but must be one of"):
        plan(model, ["int8"])
    p = plan(model)
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'top_n'"):
        p.generate([[1]], 5, top_n=3)
    with pytest.raises(ValueError, match="batch_size is -1, but must be at least 0"):
        p.init_state(-1)
    with pytest.raises(ValueError, match=r"key_padding_mask has dtype torch\.int64, but must be torch\.bool"):
        p.prefill(tokens(), p.init_state(3), key_padding_mask=torch.zeros_like(tokens()))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \[1, 14\], but must be \[3, 14\]"):
        p.prefill(tokens(), p.init_state(3), key_padding_mask=tokens()[:1] < 3)
    with pytest.raises(ValueError, match=f"token holds ids from {V} to {V}"):
        p.step(torch.tensor([V]), p.init_state(1))
    with pytest.raises(ValueError, match="logits_to_keep is 0, but must be at least 1"):
        p.prefill(tokens(), p.init_state(3), logits_to_keep=0)
    with pytest.raises(ValueError, match=r"tokens is torch\.float32"):
        p.prefill(torch.zeros(1, 2), p.init_state(1))
    with pytest.raises(ValueError, match="state is not a state of this plan's model"):
        p.from_model(decoder(**MODELS["softmax"]).init_state(1))
    with pytest.raises(ValueError, match="state is a DecoderState, but must be a PlanState"):
        p.step(torch.tensor([1]), model.init_state(1))
    for other in (decoder(**MODELS["softmax"]), decoder(**MODELS["linear"] | {"n_layers": 1})):
        with pytest.raises(ValueError, match=r"state has the shapes \[.*\], but must be of this plan"):
            p.to_model(plan(other).init_state(1))
    with pytest.raises(ValueError, match="state is a DecoderState, but must be a PlanState"):
        p.to_model(model.init_state(1))
    with pytest.raises(ValueError, match="state has 3 rows, but must have 2"):
        p.step(torch.tensor([1, 2]), p.init_state(3))
    with pytest.raises(
        ValueError, match=f"the input has length 15, but must have at most {LENGTH}, the positions"
    ):
        p.prefill(tokens(length=LENGTH + 1), p.init_state(3))


def test_a_state_may_have_any_strides_but_only_its_own_types():
    p, token = plan(decoder(**MODELS["hybrid"])), torch.tensor([1, 2, 3])
    _, state = p.prefill(tokens(), p.init_state(3))
    expected, _ = p.step(token, state)
    turned = state._replace(
        fixed=state.fixed.T.contiguous().T, cache=state.cache.transpose(1, 2).contiguous().transpose(1, 2)
    )
    assert torch.equal(p.step(token, turned)[0], expected)
    with pytest.raises(ValueError, match="state is not contiguous, but must be so with in_place=True"):
        p.step(token, turned, in_place=True)
    for wrong in (
        state._replace(fixed=state.fixed.half()),
        state._replace(cache=state.cache.double()),
        state._replace(position=state.position.int()),
        state._replace(cache=state.cache[:, :15].contiguous()),
    ):
        with pytest.raises(ValueError, match=r"state has the types .* as this plan makes it"):
            p.step(token, wrong)


def test_each_row_may_read_as_many_tokens_as_it_has_positions():
    p, ids = plan(decoder(**MODELS["learned positions"])), tokens(rows=2)
    first, second = (torch.arange(n).expand(2, n) for n in (10, 10))
    rows = torch.tensor([[10], [0]])
    _, state = p.prefill(ids[:, :10], p.init_state(2), key_padding_mask=first >= rows)
    logits, state = p.prefill(ids[:, :10], state, key_padding_mask=second >= 12 - rows.clamp(min=2))
    assert state.position.tolist() == [12, 10]
    alone, _ = p.prefill(ids[1:, :10], p.init_state(1))
    torch.testing.assert_close(logits[1], alone[0], rtol=1e-5, atol=1e-5)


def test_a_state_at_an_impossible_position_is_refused():
    p, token = plan(decoder(**MODELS["window"])), torch.tensor([1])
    for position in (-1, MOST_POSITIONS + 1, 2**63 - 2):
        state = p.init_state(1)._replace(position=torch.tensor([position]))
        for read in (p.step, lambda token, state: p.prefill(token[None], state)):
            with pytest.raises(
                ValueError, match=f"state has positions from {position} to {position}, but must"
            ):
                read(token, state)
    _, last = p.step(token, p.init_state(1)._replace(position=torch.tensor([MOST_POSITIONS - 1])))
    with pytest.raises(ValueError, match=f"but must have at most {MOST_POSITIONS}, the positions"):
        p.step(token, last)


def test_the_part_with_the_fewest_positions_limits_a_model():
    p = plan(decoder(**linear(feature_map="cosformer"), positions="learned", max_length=LENGTH))
    p.prefill(tokens(), p.init_state(3))
    with pytest.raises(ValueError, match=f"must have at most {LENGTH}, the positions"):
        p.prefill(tokens(length=LENGTH + 1), p.init_state(3))


@pytest.mark.parametrize("name", ["linear", "softmax", "hybrid"])
def test_a_state_is_cut_and_grown_without_a_change(name):
    p = plan(decoder(**MODELS[name]))
    tokens = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))
    _, state = p.prefill(tokens[:, :20], p.init_state(2))
    expected, _ = p.prefill(tokens[:, 20:], state)
    for room in (0, 20, 100):
        resized = p.resized(state, room)
        assert torch.equal(p.prefill(tokens[:, 20:], resized)[0], expected)
        assert p.state_bytes(max(room, 20)) * 2 == sum(x.nbytes for x in resized)
    assert torch.equal(p.resized(p.resized(state, 100), 0).cache, p.resized(state, 0).cache)


@pytest.mark.parametrize("name", ["linear", "softmax", "hybrid"])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 17])
def test_it_goes_back_to_a_state_after_more_was_read_in_place(name, position):
    p = plan(decoder(**MODELS[name]))
    ids = torch.randint(V, (60,), generator=torch.Generator().manual_seed(0))
    rows, places = torch.zeros(60, dtype=torch.long), torch.full((60,), -1)
    state = p.with_room(p.init_state(1), 60)
    for begin, end in ((0, position), (position, 60)):
        before, mark = p.resized(state, 0), p.mark(state)
        p.read(ids[begin:end], rows[begin:end], places[begin:end], [state], torch.empty(0, V))
    again = p.back(mark)
    assert int(state.position) == 60
    assert all(torch.equal(x, y) for x, y in zip(again, before, strict=True))


def test_very_wide_matrices_have_16_bits():
    config = DecoderConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=2, d_ff=65_568)
    weights = {x.weights for x in plan(Decoder(config), "int8")._program.packed.values() if x.inputs > 65_536}
    assert weights == {"bf16"}


def check_equal(model, ids=None):
    ids, p = tokens() if ids is None else ids, plan(model)
    with torch.no_grad():
        expected = model(ids)
    torch.testing.assert_close(p.prefill(ids, p.init_state(len(ids)))[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_norm_may_have_no_epsilon_of_its_own():
    model = decoder(norm_type="rmsnorm", positions="none")
    model.embedding.weight.mul_(1e-4)  # so that the epsilon of torch counts
    for norm in (m for m in model.modules() if isinstance(m, nn.RMSNorm)):
        norm.eps = None
    check_equal(model)


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_embeddings_may_have_a_limit_in_any_norm(order):
    model = decoder()
    model.embedding.max_norm, model.embedding.norm_type = 0.5, order
    check_equal(model)


def test_tied_embeddings_may_hold_a_start_symbol():
    model = decoder(tie_embeddings=True, start_token=True)
    check_equal(model, torch.cat([torch.full((3, 1), V), tokens()], 1))


def test_heads_of_two_numbers_have_closed_angles():
    check_equal(decoder(**of("retention", rotary=True, angles="closed"), d_model=8))


@pytest.mark.parametrize(
    ("name", "options"),
    [("polynomial", {"offset": 3.0}), ("dpfp", {"nu": 3}), ("cosformer", {"max_length": LENGTH - 1})],
)
def test_feature_maps_have_options_of_their_own(name, options):
    chosen = linear(feature_map=name, feature_map_options=options)
    check_equal(decoder(**chosen, positions="none"))


@torch.no_grad()
def test_random_features_of_zeros_are_those_of_the_model():
    model = decoder(**MODELS["rfa"])
    for block in model.stack.blocks:
        block.attention.qkv_proj.weight[:64].zero_()  # queries and keys
        block.attention.qkv_proj.bias[:64].zero_()
    check_equal(model)


@torch.no_grad()
def test_a_small_sum_of_random_features_is_raised_as_in_the_model():
    model = decoder(**of("rfa", n_features=1), d_model=8, n_layers=1, d_ff=0)
    layer = model.stack.blocks[0].attention
    layer.qkv_proj.weight.zero_()
    layer.qkv_proj.bias.copy_(torch.tensor([1.0, 0.0] * 4 + [0.0, 1.0] * 4 + [1.0] * 8))
    layer.feature_map.scale.fill_(1)
    layer.feature_map.projection.weight.copy_(torch.tensor([torch.pi / 2, 0.0]))
    ids, p = tokens(rows=1, length=1), plan(model)
    found, _ = p.prefill(ids, p.init_state(1))
    # The sum is 0 but for the rounding of pi / 2 and of a cosine, so it is raised to 1e-6. Undivided by less,
    # the values would change a logit by 0.3.
    torch.testing.assert_close(found, model(ids), rtol=0, atol=0.1)


def test_a_matrix_that_fills_a_tile_has_4_bits():
    packed = plan(decoder(d_ff=TILE), "int4")._program.packed
    assert packed["stack.blocks.0.ff.up"].weights == "int4"
    assert packed["stack.blocks.0.ff.down"].weights == "int8"


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_every_weight_counts_once(weights):
    p = plan(decoder(positions="none"), weights)
    assert p.nbytes == sum(x.nbytes for x in p.tensors().values())
    x, y = torch.zeros(6, 8), torch.zeros(3)
    views = p._program._replace(kept=[x[2], x[:4], y, x[3:5]], others={"x": x, "y": y[1:]})
    assert views.nbytes == x.nbytes + y.nbytes


def test_a_full_cache_is_doubled():
    p = plan(decoder(**MODELS["softmax"]))
    state = p.with_room(p.init_state(1), 64)._replace(position=torch.tensor([64]))
    assert state.cache.shape[1] == 64
    assert p.with_room(state, 1).cache.shape[1] == 128


def test_the_documents_of_a_plan_are_its_own():
    model = decoder()
    p = plan(model)
    p.documents["vocabulary.json"] = {}
    assert not model.documents


def test_a_plan_is_made_unasked_only_where_its_kernels_are_preferred():
    assert unasked()
    with prefer("native"):
        assert unasked()
    with prefer("reference"):
        assert not unasked()


def test_the_kernel_is_told_the_threads_of_torch():
    p, before = plan(decoder()), torch.get_num_threads()
    sequences, found = p.sequences([p.init_state(1)]), []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            found.append(p.described(sequences))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[2] != found[1]
