"""Mechanisms, cells and models on a CUDA GPU equal those on the CPU in fp64, gradients included."""

import copy

import pytest
import torch
from commands import works
from safetensors.torch import load_file
from small_models import FIELDS, arguments, small_model

from unrolled import attention, recurrent
from unrolled.cli import recipes
from unrolled.generation import generate
from unrolled.generation.cuda_graph import Step
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import leaves
from unrolled.testing import CellMaker, Maker
from unrolled.testing._kit import directions, unroll, with_gradients
from unrolled.testing._kit import recurrent as recurs
from unrolled.training import read_log

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """By default, cuDNN multiplies fp32 in tf32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


PLAN = [("prefill", 70), ("step", 1), ("prefill", 5), ("step", 2)]
LENGTH = sum(n for _, n in PLAN)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = dict(zip(DTYPES, (1e-10, 5e-4, 5e-2), strict=True))
"""The largest error, relative to the largest number of a result, or to 1 if that is larger."""
DISCRETE = ("clustered", "reformer")
"""Rounding changes which keys these choose, so they are compared in fp64 only."""
MECHANISMS = [
    (name, causal, dtype)
    for name in attention.names()
    for causal in directions(attention.load(name).supports)
    for dtype in (DTYPES[:1] if name in DISCRETE else DTYPES)
]


def check(run, module, dtype):
    """`run(module, move)` gives results by name; `move` brings a tensor to the module's device and dtype."""

    def move(x):
        return x.to("cuda", dtype if x.is_floating_point() else None)

    exact = run(module, lambda x: x)
    found = run(copy.deepcopy(module).to("cuda", dtype), move)
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        assert found[name].is_cuda, name
        error = (found[name].cpu().double() - x).abs()
        assert not error.numel() or error.max() <= TOLERANCE[dtype] * x.abs().max().clamp(min=1), name


@pytest.mark.parametrize(("name", "causal", "dtype"), MECHANISMS, ids=str)
def test_mechanisms(name, causal, dtype):
    make = Maker(attention.load(name), d_model=128)
    module, x = make(causal=causal), make.input(2, LENGTH, grad=False)
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 9]])

    def run(module, move):
        given = move(x).requires_grad_()
        masks = {"key_padding_mask": move(padding)} if module.supports.padding else {}
        results = with_gradients(module, module(given, **masks), x=given)
        if causal and recurs(module.supports):
            results["steps"] = unroll(module, given, PLAN)[0].detach()
        return results

    check(run, module, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", recurrent.names())
def test_cells(name, dtype):
    make = CellMaker(recurrent.load(name), d_model=32)
    module, x = make(causal=True), make.input(2, LENGTH, grad=False)

    def run(module, move):
        given = move(x).requires_grad_()
        steps = {"steps": unroll(module, given, PLAN)[0].detach()}
        return with_gradients(module, module(given), x=given) | steps

    check(run, module, dtype)


@pytest.mark.parametrize("kind", FIELDS)
def test_models(kind):
    torch.manual_seed(0)
    model = small_model(kind).double()
    for part in model.modules():
        part.training = isinstance(part, torch.nn.RNNBase)  # else cuDNN has no gradient
    inputs, targets = arguments(kind)

    def run(model, move):
        loss = model.loss(move(inputs[0]), move(targets))
        outputs = model(*map(move, inputs))
        return with_gradients(model, loss[None]) | {"forward": outputs.detach()}

    check(run, model, torch.float64)


SECTIONS = {"data": {}, "train": {}}
CPU = torch.device("cpu")


def of_recipe(name):
    own = {"axial_shape": [8, 8]} if name == "pixels" else {}
    return DecoderConfig(vocab_size=256, **recipes.apply(name, SECTIONS | {"model": own}, [], CPU)["model"])


@pytest.mark.parametrize("name", [name for name in recipes.RECIPES if name != "speech"])
def test_models_of_recipes_generate_what_they_do_on_the_cpu(name):
    torch.manual_seed(0)
    model = Decoder(of_recipe(name)).double().eval()
    prompts = torch.randint(256, (2, 20))
    expected = generate(model, prompts, 12, temperature=0)
    found = generate(model.to("cuda"), prompts.to("cuda"), 12, temperature=0)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def constant_states():
    """Mechanisms whose states keep their size, with the positions that all of them can use."""
    found = {name: attention.load(name).supports for name in attention.names()}
    names = [name for name, x in found.items() if x.causal and x.recurrence == "constant"]
    return [(name, positions) for name in names for positions in ("none", "learned")]


@pytest.mark.parametrize(("name", "positions"), constant_states())
def test_generation_from_a_graph_draws_what_launched_steps_draw(name, positions, monkeypatch):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 64, "n_layers": 2, "n_heads": 2, "max_length": 64}
    model = Decoder(DecoderConfig(attention=name, positions=positions, **sizes)).cuda().double()
    recorded = []
    monkeypatch.setattr(Step, "_begin", lambda *given, begin=Step._begin: recorded.append(1) or begin(*given))
    # seven of 50 tokens end a row, so half of the 16 rows end early for any weights
    stop = [7, [3], 11, 19, 23, 31, 42]
    asked = {"stop": stop, "num_samples": 2, "top_k": 20, "repetition_penalty": 1.2, "seed": 1}

    def drawn():
        return [x.tolist() for x in generate(model, torch.randint(50, (8, 9)), 30, **asked)]

    torch.manual_seed(1)
    found = drawn()
    assert len(recorded) > 1  # anew for fewer rows
    recorded.clear()
    model.register_forward_hook(lambda *_: None)  # such a model is not recorded
    torch.manual_seed(1)
    assert drawn() == found
    assert not recorded


@pytest.mark.parametrize("name", ["classic", "best-lm"])
def test_a_cuda_graph_of_a_step(name):
    torch.manual_seed(0)
    model = Decoder(of_recipe(name)).cuda().eval()
    tokens = torch.randint(256, (1, 20), device="cuda")
    with torch.inference_mode():
        token, state = tokens[:, 0].clone(), model.init_state(1)
        model.step(token, state)  # compiles the kernels, and checks them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, after = model.step(token, state)
            for old, new in zip(leaves(state).values(), leaves(after).values(), strict=True):
                old.copy_(new)
        own = model.init_state(1)
        for number in range(20):
            token.copy_(tokens[:, number])
            graph.replay()
            expected, own = model.step(tokens[:, number], own)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ["rwkv-lm", "small-lm", "best-lm"])
def test_a_run_learns_and_goes_on_bit_for_bit(recipe, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{number} times {number} is {number * number}. " for number in range(3000)))
    given = [f"data.path={book}", f"model.recipe={recipe}", "train.schedule=constant", "train.eval_every=6"]
    for folder, steps in (("whole", [24]), ("parts", [7, 24])):
        for last in steps:
            works("train", "data.name=text", *given, f"train.steps={last}", f"run_dir={tmp_path / folder}")
    whole, parts = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "parts"))
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    losses = [line["loss"] for line in read_log(tmp_path / "whole" / "log.jsonl") if line["event"] == "eval"]
    assert losses[-1] < 0.8 * losses[0]
