"""The delta rule against flash-linear-attention's and Hugging Face's references, all of them in fp32."""

import inspect

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree
from torch.nn.functional import normalize

from unrolled.ops.delta import delta_rule, delta_rule_step

D = 8


def random_inputs(T=192, H=2, M=5):
    generator = torch.Generator().manual_seed(0)
    q, k = (normalize(torch.randn(2, T, H, D, generator=generator), dim=-1) for _ in range(2))
    v, beta = torch.randn(2, T, H, M, generator=generator), torch.rand(2, T, H, generator=generator)
    log_decay = -0.2 * torch.rand(2, T, H, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, beta, log_decay)]


@pytest.mark.parametrize("form", ["recurrence", "chunkwise"])
def test_fla_delta_rule(form):
    naive = pytest.importorskip("fla.ops.delta_rule.naive")
    q, k, v, beta, _ = random_inputs()
    heads_first = [x.transpose(1, 2) for x in (q, k, v, beta)]
    theirs, state = getattr(naive, f"delta_rule_{form}")(*heads_first)
    ours, our_state = delta_rule(q * D**-0.5, k, v, beta)  # they scale the queries
    what, theirs = f"delta rule, {form}", theirs.transpose(1, 2)
    assert_all_agree(ours, theirs, [q, k, v, beta], what, library="fla-core 0.6.0")
    assert_agree(our_state, state, f"delta rule, {form}, state")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_fla_gated_delta_rule(form):
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    q, k, v, beta, log_decay = inputs = random_inputs()
    function = getattr(naive, f"naive_{form}_gated_delta_rule")
    theirs, state = function(q, k, v, beta=beta, g=log_decay, scale=1.0, output_final_state=True)
    ours, our_state = delta_rule(q, k, v, beta, log_decay=log_decay)
    assert_all_agree(ours, theirs, inputs, f"gated delta rule, {form}", library="fla-core 0.6.0")
    assert_agree(our_state, state, f"gated delta rule, {form}, state")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_fla_kimi_delta_attention(form):
    naive = pytest.importorskip("fla.ops.kda.naive")
    q, k, v, beta, log_decay = inputs = random_inputs()
    log_decay = inputs[4] = (log_decay.detach().unsqueeze(-1) * k.detach().abs()).requires_grad_()
    function = getattr(naive, f"naive_{form}_kda")
    theirs, state = function(q, k, v, g=log_decay, beta=beta, output_final_state=True)
    ours, our_state = delta_rule(q * D**-0.5, k, v, beta, log_decay=log_decay)
    what = f"delta rule with a gate for every feature, {form}"
    assert_all_agree(ours, theirs, inputs, what, library="fla-core 0.6.0")
    assert_agree(our_state, state, f"{what}, state")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_next", "torch_{}_gated_delta_rule"), ("kimi_linear", "{}_kimi_delta_attention")],
)
def test_hugging_face(family, name, form):
    modelling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k, v, beta, log_decay = inputs = random_inputs(T=150)
    if family == "kimi_linear":  # a gate for every feature
        log_decay = inputs[4] = (log_decay.detach().unsqueeze(-1) * k.detach().abs()).requires_grad_()
    # What is decorated prefers the Triton kernel of fla, where that is installed, GPU or not.
    function = inspect.unwrap(getattr(modelling, name.format(form)))
    begin = torch.randn(2, 2, D, 5, generator=torch.Generator().manual_seed(2))
    theirs, state = function(q, k, v, g=log_decay, beta=beta, initial_state=begin, output_final_state=True)
    ours, our_state = delta_rule(q * D**-0.5, k, v, beta, log_decay=log_decay, state=begin)
    what = f"delta rule of {family}, {form}"
    assert_all_agree(ours, theirs, inputs, what, library="transformers 5.24.0")
    assert_agree(our_state, state, f"{what}, state")
    S = begin
    for t in range(20):
        token = [x[:, t] for x in (q * D**-0.5, k, v, beta)]
        o, S = delta_rule_step(*token, S, log_decay=log_decay[:, t])
        assert_agree(o, theirs[:, t], f"step {t}")
