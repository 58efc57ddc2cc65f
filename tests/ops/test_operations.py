"""What holds for every operation on whole sequences: linear, diagonal, window and softmax attention."""

from collections.abc import Callable
from functools import partial
from importlib import reload

import pytest
import torch
from torch import Tensor

from unrolled import linear_attention, softmax_attention, window_attention
from unrolled.ops.delta import delta_rule, delta_rule_step
from unrolled.ops.dplr import dplr, dplr_step
from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_step
from unrolled.ops.linear import LinearState, linear_attention_step
from unrolled.ops.packing import unpack
from unrolled.ops.selective_scan import selective_scan, selective_scan_step
from unrolled.ops.window import operator
from unrolled.ops.wkv import wkv, wkv_step


def diagonal(q: Tensor, k: Tensor, v: Tensor, **masks: Tensor) -> Tensor:
    """Diagonal linear attention whose gates follow from the keys, since it takes no default."""
    return diagonal_linear_attention(q, k, v, -k.nan_to_num().clamp(-1, 1).square(), **masks)


FORMS = {
    "linear": partial(linear_attention, causal=True),
    "diagonal": diagonal,
    "window": partial(window_attention, window_size=(20, 1)),
    "softmax": partial(softmax_attention, causal=True),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
operators = pytest.mark.parametrize("form", [FORMS["linear"], FORMS["window"]], ids=["linear", "window"])


@every_form
def test_padded_garbage_has_no_effect(form):
    q, k, v = (torch.rand(1, 6, 1, 3) for _ in range(3))
    padding = torch.tensor([[False, True, False, False, True, False]])
    expected = form(q, k, v, key_padding_mask=padding)
    k[:, 1], v[:, 1], k[:, 4], v[:, 4] = torch.inf, torch.nan, torch.nan, -torch.inf
    assert torch.equal(form(q, k, v, key_padding_mask=padding), expected)


@every_form
def test_packed_rows_are_the_sequences_alone(form):
    cu_seqlens = torch.tensor([0, 3, 3, 73, 74], dtype=torch.int32)
    q, k, v = (torch.rand(1, 74, 2, 3) for _ in range(3))
    o = form(q, k, v, cu_seqlens=cu_seqlens)
    parts = [unpack(x, cu_seqlens) for x in (q, k, v, o)]
    assert [len(x) for x in parts[0]] == [3, 0, 70, 1]
    for q_n, k_n, v_n, o_n in zip(*parts, strict=True):
        torch.testing.assert_close(form(q_n[None], k_n[None], v_n[None])[0], o_n)


@every_form
def test_strides_and_expanded_gradients_are_honoured(form):
    base = torch.rand(2, 140, 3, 4, 6, dtype=torch.float64)
    views = [base[:, :, i].transpose(2, 3)[..., ::2].requires_grad_() for i in range(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    for q, k, v in (views, copies):
        form(q, k, v).sum().backward()  # sends an expanded gradient back
    for x, y in zip(views, copies, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-13, atol=1e-13)


@every_form
def test_inputs_of_mixed_types_are_promoted(form):
    q, k, v = torch.rand(1, 5, 1, 3), torch.rand(1, 5, 1, 3).double(), torch.rand(1, 5, 1, 3).bfloat16()
    assert form(q, k, v).dtype == torch.bfloat16


def on_devices(T: int) -> list[tuple[str, Callable[..., object], dict[str, Tensor | LinearState]]]:
    """List every operation that takes a state: the arguments whose devices it must check."""
    x, row = torch.rand(1, T, 2, 4) / 4, torch.rand(1, T, 2)
    kv, k_sum = torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4)
    linear_state = {"state": LinearState(kv, k_sum)}
    qkv = {"q": x, "k": x, "v": x}
    step = {name: y[:, 0] for name, y in qkv.items()}
    tokens = {"x": row, "dt": row, "b": row, "c": row}
    scan = {**tokens, "a": -x[0, 0, :, :2], "state": kv[:, :, :2, 0]}
    averages = {"k": row, "v": row, "log_decay": -row[0, 0], "bonus": row[0, 0], "state": kv[:, 0, :3, :2]}
    return [
        ("linear", partial(linear_attention, causal=True, return_state=True), qkv | linear_state),
        ("linear step", linear_attention_step, step | linear_state),
        ("gla", diagonal_linear_attention, qkv | {"log_decay": -x, "state": kv}),
        ("gla step", diagonal_linear_attention_step, step | {"log_decay": -x[:, 0], "state": kv}),
        ("delta", delta_rule, qkv | {"beta": row, "log_decay": -row, "state": kv}),
        ("delta step", delta_rule_step, step | {"beta": row[:, 0], "state": kv}),
        ("dplr", dplr, qkv | {"a": x, "b": x, "log_decay": -x, "state": kv}),
        ("dplr step", dplr_step, step | {"a": x[:, 0], "b": x[:, 0], "log_decay": -x[:, 0], "state": kv}),
        ("selective scan", selective_scan, scan),
        ("selective scan step", selective_scan_step, {**scan, **{name: scan[name][:, 0] for name in tokens}}),
        ("wkv", wkv, averages),
        ("wkv step", wkv_step, averages | {"k": row[:, 0], "v": row[:, 0]}),
    ]


@pytest.mark.parametrize(
    ("operation", "arguments"), [pytest.param(f, x, id=name) for name, f, x in on_devices(3)]
)
def test_tensors_of_two_devices_are_refused(operation, arguments):
    operation(**arguments)
    for name, x in arguments.items():
        moved = (
            [x.to("meta")]
            if isinstance(x, Tensor)
            else [x._replace(**{field: getattr(x, field).to("meta")}) for field in x._fields]
        )
        for each in moved:
            with pytest.raises(ValueError, match="is on "):
                operation(**arguments | {name: each})


@operators
def test_gradients_with_a_graph_are_right_when_inputs_depend_on_each_other(form):
    x = torch.rand(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)

    def chained(x):
        o = form(x.exp(), x.exp(), x)
        return form(o, 2 * o, x).square().sum()

    for function in (chained, lambda x: form(x, x, x).sum()):
        (plain,) = torch.autograd.grad(function(x), x)
        (with_graph,) = torch.autograd.grad(function(x), x, create_graph=True)
        torch.testing.assert_close(with_graph, plain, rtol=1e-12, atol=1e-12)
        assert torch.autograd.gradgradcheck(function, x)


@operators
@pytest.mark.parametrize("offsets", [[0, 2, 5], [0]])
def test_packs_have_second_derivatives(form, offsets):
    x = [torch.rand(1, offsets[-1], 1, 2, dtype=torch.float64).requires_grad_() for _ in range(3)]
    packed = partial(form, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    with_graph = torch.autograd.grad(packed(*x).sum(), x, create_graph=True)
    assert [g.shape for g in with_graph] == [y.shape for y in x]
    assert torch.autograd.gradgradcheck(lambda q, k, v: packed(q, k, v).sum(), x)


def test_a_module_that_registers_an_operator_can_be_reloaded():
    q, k, v = (torch.rand(1, 30, 2, 5, requires_grad=True) for _ in range(3))

    def results():
        o = FORMS["window"](q, k, v)
        return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]

    expected = results()
    reload(operator)
    assert all(map(torch.equal, results(), expected))


@operators
def test_compiles_and_exports_as_one_graph(form):
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return form(q, k, v)

    torch.compiler.reset()  # forms share the code of `forward`
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (70, 40):
            qkv = [torch.rand(2, length, 2, 3).requires_grad_() for _ in range(3)]
            found, expected = compiled(*qkv), Model()(*qkv)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            for x, y in zip(*(torch.autograd.grad(o.sum(), qkv) for o in (found, expected)), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)
    lengths = {name: {1: torch.export.Dim("T", min=2, max=512)} for name in "qkv"}
    inputs = tuple(torch.rand(2, 70, 2, 3) for _ in range(3))
    exported = torch.export.export(Model(), inputs, dynamic_shapes=lengths).module()
    longer = [torch.rand(2, 130, 2, 3) for _ in range(3)]
    torch.testing.assert_close(exported(*longer), Model()(*longer), rtol=0, atol=0)


@every_form
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.rand(2, 5, 3)}, r"q has shape \[2, 5, 3\], but must have four axes"),
        ({"q": torch.ones(2, 5, 4, 3).long()}, "q has dtype torch.int64, but must be a floating-point"),
        ({"q": torch.rand(2, 5, 4, 2)}, r"q has shape \[2, 5, 4, 2\], but must be \[2, T, H, 3\] for k \[2, 5, 2, 3\]"),
        ({"q": torch.rand(2, 5, 3, 3)}, "q has 3 heads, but must have a multiple of the 2 heads"),
        ({"v": torch.rand(2, 4, 2, 6)}, r"v has shape \[2, 4, 2, 6\], but must be \[2, 5, 2, M\] for k"),
        ({"key_padding_mask": torch.zeros(2, 5)}, "key_padding_mask has dtype torch.float32, but must be torch.bool"),
        ({"key_padding_mask": torch.zeros(5).bool()}, r"key_padding_mask has shape \[5\], but must be \[2, 5\]"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "packs sequences into one row, but there are 2"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is torch.int64 .* must be torch.int32 \[N\+1\]"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_clear_sentence(form, changes, message):
    qkv = {"q": torch.rand(2, 5, 4, 3), "k": torch.rand(2, 5, 2, 3), "v": torch.rand(2, 5, 2, 6)}
    with pytest.raises(ValueError, match=message):
        form(**qkv | changes)


def test_packs_have_as_many_queries_as_keys():
    q, k = torch.rand(1, 4, 2, 3), torch.rand(1, 5, 2, 3)
    with pytest.raises(ValueError, match="as many queries as keys, but there are 4 and 5"):
        linear_attention(q, k, k, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))


@every_form
@pytest.mark.parametrize("offsets", [[0, 3, 2, 5], [1, 5], [0, 4]])
def test_offsets_that_do_not_rise_to_the_end_are_refused(form, offsets):
    x = torch.rand(1, 5, 2, 3)
    with pytest.raises(ValueError, match="but must rise from 0 to T = 5"):
        form(x, x, x, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
