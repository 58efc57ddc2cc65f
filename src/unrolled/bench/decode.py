"""Cases of generation: a step of a decoder, by its layers, plans and others; and tokens drawn by plans."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unrolled.bench import measure
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings
from unrolled.bench.machine import seconds_to_read
from unrolled.bench.models import (
    attention_operations,
    decoder,
    doubled,
    exact_logits,
    matmuls,
    rounding_bound,
    run_definition,
)
from unrolled.bench.peer_models import idiap_encoder
from unrolled.bench.units import brief_time, size
from unrolled.decode import Plan, plan
from unrolled.decode.packing import PACKINGS, Weights, rounded
from unrolled.decode.request import Request
from unrolled.generation import engine
from unrolled.models import Decoder
from unrolled.ops.state import nbytes

STEPS = 64
# Largest error, relative to the largest logit, where the inputs of a matrix are rounded too: with int8 to 16
# bits, by the others to 8.
TOLERANCES = {"int8": 2e-3, "int4": 0.2, "ONNX Runtime int8": 0.2}

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def step(batch: int, settings: Settings) -> Problem:
    """Generate from an empty state: `STEPS` tokens of each of `batch` sequences."""
    model = decoder("linear", settings).eval()
    tokens = measure.random_tokens(model, STEPS, batch)

    @torch.inference_mode()
    def generated(advance: Step, begin: Callable[[], Any]) -> list[Tensor]:
        state, logits = begin(), []
        for token in tokens.unbind(1):
            y, state = advance(token, state)
            logits.append(y)
        return [torch.stack(logits, 1)]

    def layers() -> Callable[[], list[Tensor]]:
        return partial(generated, model.step, partial(model.init_state, batch))

    def planned(weights: Weights) -> Callable[[], list[Tensor]]:
        made = plan(model, weights)
        return partial(generated, made.step, partial(made.init_state, batch))

    def idiap() -> Callable[[], list[Tensor]]:
        encoder = idiap_encoder(model, recurrent=True).eval()

        def advance(token: Tensor, state: Any) -> tuple[Tensor, Any]:
            hidden, state = encoder(model.embedding(token), state)
            return model.head(hidden), state

        return partial(generated, advance, lambda: None)

    def onnx(graph: str) -> Callable[[], list[Tensor]]:
        from unrolled.interop import onnx

        with tempfile.TemporaryDirectory() as folder:
            onnx.export(model, folder, int8=True)
            loaded = onnx.load(folder, graph, threads=settings.threads)
        return partial(generated, loaded.step, partial(loaded.init_state, batch))

    operations = batch * (matmuls(model) + attention_operations(model, 1, gradients=False))
    moved = streamed_bytes(model) + 2 * nbytes(model.init_state(batch))
    compute = partial(exact_logits, model, tokens)
    exact = rounding_bound(model, STEPS)
    kinds = {"fp32": Definition(compute, ["logits"], exact, operations, moved)}
    for weights in ("bf16", "int8", "int4"):
        of_rounded = partial(_rounded_logits, model, weights, tokens)
        kinds[weights] = Definition(of_rounded, ["logits"], TOLERANCES.get(weights, exact))
    kinds["ONNX Runtime int8"] = Definition(compute, ["logits"], TOLERANCES["ONNX Runtime int8"])
    contenders = [
        *(Contender(_name(w), partial(planned, w), w, ours=True) for w in PACKINGS),
        Contender("unrolled, layer by layer", layers, "fp32", ours=True),
        Contender("fast-transformers, recurrent", idiap, "fp32"),
        Contender("ONNX Runtime, our export", partial(onnx, "plain"), "fp32"),
        Contender("ONNX Runtime int8, our export", partial(onnx, "int8"), "ONNX Runtime int8"),
    ]
    return Problem(contenders, kinds, STEPS, batch, partial(_remark, streamed_bytes(model), settings))


def drawing(batch: int, settings: Settings) -> Problem:
    """Draw `STEPS` tokens of each of `batch` sequences with top-k and top-p."""
    model = decoder("linear", settings).eval()
    prompts = [[row] for row in range(batch)]
    options: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "temperature": 0.8, "seed": 0}

    request = Request.of(model.config, prompts, STEPS, **options)

    def prepared(made: Plan) -> Callable[[], list[Tensor]]:
        return lambda: [torch.stack(made.run(request)).double()]

    def expected(made: Plan) -> list[Tensor]:
        return [torch.stack(engine.run(made, request)).double()]

    kinds, contenders = {}, []
    for weights in PACKINGS:
        made = plan(model, weights)
        kinds[str(weights)] = Definition(partial(expected, made), ["tokens"], 0.0)
        contenders.append(Contender(_name(weights), partial(prepared, made), weights, ours=True))
    return Problem(contenders, kinds, STEPS, batch, partial(_remark, streamed_bytes(model), settings))


def streamed_bytes(model: Decoder) -> int:
    """Count the bytes of weights that every step reads: all but the embedding, of which it reads a row."""
    return sum(x.nbytes for name, x in model.named_parameters() if not name.startswith("embedding"))


def _name(weights: Weights) -> str:
    return f"unrolled, plan in {weights}"


def _rounded_logits(model: Decoder, weights: Weights, tokens: Tensor) -> list[Tensor]:
    found = doubled(model)
    for name, x in found.items():
        if weights != "fp32" and name.startswith("embedding"):
            found[name] = rounded(x, "bf16").double()
        elif x.dim() == 2:
            found[name] = rounded(x, weights).double()
    with torch.no_grad():
        return [run_definition(model, found, tokens)]


def _remark(weights: int, settings: Settings, medians: Mapping[str, float]) -> str:
    if _name("fp32") not in medians:
        return ""
    seconds = seconds_to_read(weights, settings)
    share = seconds / medians[_name("fp32")]
    alone = f"only reading {size(weights)}, as much as the weights are, takes {brief_time(seconds)}"
    return f"{alone}, {share:.0%} of a step in fp32."


DECODER = "a decoder, 8 layers, 8 heads, 256 wide, feed-forward 1,024, 256 outcomes"
CASES = [
    Case("step", f"One step of {DECODER}.", "batch", (1, 16), (1, 2), step),
    Case(
        "drawing", f"A token drawn from {DECODER}, with top-k and top-p.", "batch", (1, 16), (1, 2), drawing
    ),
]
