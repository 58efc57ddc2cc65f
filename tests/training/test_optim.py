import copy
import math

import pytest
import torch
from small_models import small_model
from torch import nn

from unrolled.training import muon
from unrolled.training.optim import Schedule, build_optimizers

from .kinds import cases, made
from .standin import config


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_only_matrices_decay(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (optimizer,) = build_optimizers(model, config(optimizer=name, lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n] * 0.95 if p.ndim == 2 else before[n])


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_gains_and_offsets_with_two_axes_do_not_decay(kind):
    """Gains begin at 1 and offsets at 0, except for those named here."""
    others = {"decay_bias", "mix", "erased", "replaced", "bonus"}
    for _, _, fields in filter(lambda case: case[1] == kind, cases()):
        model = made(kind, fields)
        linear = {f"{name}.weight" for name, x in model.named_modules() if isinstance(x, nn.Linear)}
        decayed = build_optimizers(model, config(weight_decay=0.5))[0].param_groups[0]["param_names"]
        parameters = dict(model.named_parameters())
        assert linear - parameters.keys() == linear - set(decayed)  # tied weights have one name
        for name in set(decayed) - linear:
            assert parameters[name].min() < parameters[name].max(), name
            assert name.rpartition(".")[2] not in others


@pytest.mark.parametrize("feature_map", ["hedgehog", "t2r"])
def test_biases_of_learned_feature_maps_do_not_decay(feature_map):
    options = {"attention_options": {"linear": {"feature_map": feature_map}}}
    model = made("decoder", {"attention": "linear", **options})
    decayed = build_optimizers(model, config(weight_decay=0.5))[0].param_groups[0]["param_names"]
    assert any("feature_map" in name for name in decayed)
    assert not any(name.endswith("bias") for name in decayed)


def test_a_frozen_parameter_is_not_the_optimisers():
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    (optimizer,) = build_optimizers(model, config())
    assert [n for group in optimizer.param_groups for n in group["param_names"]] == ["bias"]


def test_muon_trains_the_linear_layers_of_blocks_and_adamw_the_rest(monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: True)
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    alone = copy.deepcopy(model)
    blocks, head = alone["blocks"], alone["head"]
    adamw = [
        {"params": [head.weight], "weight_decay": 0.5},
        {"params": [blocks.bias, head.bias], "weight_decay": 0},
    ]
    expected = [
        torch.optim.Muon([blocks.weight], lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=0.1, betas=(0.9, 0.99), fused=True),
    ]
    given = build_optimizers(model, config(optimizer="muon", lr=0.1, weight_decay=0.5))
    for _ in range(3):
        for module, optimizers in ((model, given), (alone, expected)):
            module["head"](module["blocks"](torch.ones(1, 3))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adamw_updates_by_its_equations():
    torch.manual_seed(0)
    model = nn.Linear(37, 21)
    (optimizer,) = build_optimizers(model, config(lr=0.01, weight_decay=0.3))
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in range(1, 6):
        for name, p in model.named_parameters():
            # as a product leaves it: transposed in memory, which autograd undoes for a contiguous parameter
            scale = torch.randn(p.shape[::-1]).t()
            (p * scale).sum().backward()
            m, v = moments[name]
            m.lerp_(scale.double(), 1 - 0.9)
            v.lerp_(scale.double().square(), 1 - 0.99)
            expected[name] *= 1 - 0.01 * (0.3 if p.ndim == 2 else 0.0)
            corrected = (v / (1 - 0.99**step)).sqrt() + 1e-8
            expected[name] -= 0.01 * m / (1 - 0.9**step) / corrected
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=0, atol=1e-6)


def test_adamw_is_fused_where_memory_has_the_order_of_the_parameters():
    def fused(model):
        (optimizer,) = build_optimizers(model, config())
        return {group["fused"] for group in optimizer.param_groups}

    assert fused(nn.Linear(3, 4)) == {True}
    transposed = nn.Linear(3, 4)
    transposed.weight = nn.Parameter(torch.randn(3, 4).T)
    assert fused(transposed) == {False}
    assert fused(nn.Linear(3, 4, device="meta")) == {False}


@pytest.mark.parametrize(("fast", "digits"), [(True, 2e-1), (False, 1e-4)])
def test_muon_multiplies_in_bf16_only_where_that_is_fast(fast, digits, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: fast)
    weight = nn.Parameter(torch.zeros(20, 12))
    optimizer = muon.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    gradient = weight.grad = torch.randn(20, 12)
    optimizer.step()
    assert weight.grad.equal(gradient)
    assert weight.grad is gradient
    a, b, c = 3.4445, -4.7750, 2.0315  # the iteration of Muon, in fp64
    x = gradient.double().T / gradient.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    update = -weight.detach().double().T
    update *= (x * x).sum() / (update * x).sum()  # the scale of Muon's updates depends on its options
    error = float((update - x).abs().max() / x.abs().max())
    assert error < digits
    assert fast == (error > 1e-4)


def test_muon_needs_a_model_with_blocks():
    with pytest.raises(ValueError, match="optimizer is 'muon', but must be 'adamw' or 'radam' for a model"):
        build_optimizers(nn.Linear(3, 3), config(optimizer="muon"))


def test_warm_up_then_cosine():
    c = config(lr=1.0, min_lr=0.1, warmup_steps=4, steps=104)
    rates = [Schedule(c).lr(step) for step in range(c.steps + 1)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55)  # half-way
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_constant_and_a_warm_up_longer_than_the_run():
    assert Schedule(config(schedule="constant", lr=0.5, warmup_steps=0)).lr(10**6) == 0.5
    assert Schedule(config(lr=1.0, warmup_steps=100, steps=10)).lr(9) == pytest.approx(0.1)


def test_plateau_halves_after_three_evaluations_without_progress_and_stops_at_min_lr():
    schedule = Schedule(config(schedule="plateau", lr=1.0, min_lr=0.2, warmup_steps=0))
    rates = []
    for loss in [3.0, 2.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]:
        schedule.observe(loss)
        rates.append(schedule.lr(0))
    assert rates == [1.0] * 4 + [0.5] * 4 + [0.25] * 3 + [0.2]


def test_other_schedules_do_not_listen():
    schedule = Schedule(config(schedule="constant", lr=1.0, warmup_steps=0))
    for _ in range(20):
        schedule.observe(math.inf)
    assert schedule.lr(0) == 1.0


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (256, 10)])
def test_inverse_sqrt_is_the_rate_of_the_transformer(d_model, warmup):
    c = config(schedule="inverse_sqrt", lr=(d_model * warmup) ** -0.5, warmup_steps=warmup)
    for n in (1, warmup - 1, warmup, warmup + 1, 7 * warmup):  # updates are counted from 1 there
        expected = d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert Schedule(c).lr(n - 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_eps_reaches_the_optimiser(name):
    (optimizer,) = build_optimizers(nn.Linear(3, 3), config(optimizer=name, eps=1e-9))
    assert {group["eps"] for group in optimizer.param_groups} == {1e-9}


def test_betas_reach_the_optimiser():
    for name in ("adamw", "radam"):
        (optimizer,) = build_optimizers(nn.Linear(3, 3), config(optimizer=name, betas=(0.8, 0.95)))
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}


def test_the_three_evaluations_of_a_plateau_follow_each_other():
    schedule = Schedule(config(schedule="plateau", lr=1.0, warmup_steps=0))
    for loss in [3.0, 4.0, 4.0, 2.0, 3.0, 3.0]:
        schedule.observe(loss)
        assert schedule.lr(0) == 1.0


def test_the_gain_and_offset_of_the_biases_of_aft_do_not_decay():
    options = {"attention_options": {"aft": {"position_bias": "conv"}}}
    model = small_model("decoder", attention="aft", **options)
    decayed = build_optimizers(model, config(weight_decay=0.5))[0].param_groups[0]["param_names"]
    own = {name.rpartition(".")[2] for name in decayed if ".bias." in name}
    assert own == {"taps"}
