"""Cases of generation: steps of a decoder by layers, plans and other libraries, and tokens drawn by plans."""

import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from unrolled.bench import llama_cpp, measure, rwkv
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings
from unrolled.bench.machine import seconds_to_read
from unrolled.bench.models import (
    ABOUT,
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
from unrolled.decode.packing import GROUP, GROUP_BYTES, PACKINGS, Weights, rounded
from unrolled.decode.request import Request
from unrolled.generation import engine
from unrolled.models import Decoder
from unrolled.ops.state import nbytes

STEPS = 64
# Largest error, relative to the largest logit, of forms in which the inputs of a matrix are rounded too: with
# int8 to 16 bits, with the others to 8 bits, and with bf16 on some processors only.
TOLERANCES = {"bf16": 2e-2, "int8": 2e-3, "int4": 0.2, "ONNX Runtime int8": 0.2}

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def step(batch: int, settings: Settings, width: int | None = None) -> Problem:
    """Generate from an empty state: `STEPS` tokens of each of `batch` sequences."""
    model = decoder("linear", settings, width).eval()
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

        loaded = onnx.load(_exported(settings, width).name, graph, threads=settings.threads)
        return partial(generated, loaded.step, partial(loaded.init_state, batch))

    config = model.config
    head = min(llama_cpp.HEAD, config.d_model)
    shape = rwkv.Shape(config.n_layers, config.d_model, head, config.vocab_size)

    @cache  # it serves all forms
    def of_llama_cpp() -> list[Tensor]:
        return [rwkv.definition(rwkv.random_weights(shape), shape, tokens)]

    operations = batch * (matmuls(model) + attention_operations(model, 1, gradients=False))
    moved = streamed_bytes(model) + 2 * nbytes(model.init_state(batch))
    compute = partial(exact_logits, model, tokens)
    exact = rounding_bound(model, STEPS)
    kinds = {"fp32": Definition(compute, ["logits"], exact, operations, moved)}
    for weights in ("bf16", "int8", "int4"):
        of_rounded = partial(_rounded_logits, model, weights, tokens)
        kinds[weights] = Definition(of_rounded, ["logits"], TOLERANCES.get(weights, exact))
    kinds["ONNX Runtime int8"] = Definition(compute, ["logits"], TOLERANCES["ONNX Runtime int8"])
    for form, allowed in llama_cpp.TOLERANCES.items():
        kinds[f"llama.cpp {form}"] = Definition(of_llama_cpp, ["logits"], allowed)
    contenders = [
        *(Contender(_name(w), partial(planned, w), w, ours=True) for w in PACKINGS),
        Contender("unrolled, layer by layer", layers, "fp32", ours=True),
        Contender("fast-transformers, recurrent", idiap, "fp32"),
        Contender("ONNX Runtime, our export", partial(onnx, "plain"), "fp32"),
        Contender("ONNX Runtime int8, our export", partial(onnx, "int8"), "ONNX Runtime int8"),
        *(
            Contender(
                f"llama.cpp, RWKV-7 in {form}",
                partial(llama_cpp.steps, shape, form, tokens, settings.threads),
                f"llama.cpp {form}",
            )
            for form in llama_cpp.TOLERANCES
        ),
    ]
    return Problem(contenders, kinds, STEPS, batch, partial(_remark, model, settings))


def drawing(batch: int, settings: Settings, width: int | None = None) -> Problem:
    """Draw `STEPS` tokens of each of `batch` sequences with top-k and top-p."""
    model = decoder("linear", settings, width).eval()
    prompts = [[row] for row in range(batch)]
    options: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "temperature": 0.8, "seed": 0}

    request = Request.of(model.config, prompts, STEPS, **options)

    def prepared(make: Callable[[], Plan]) -> Callable[[], list[Tensor]]:
        made = make()
        return lambda: [torch.stack(made.run(request)).double()]

    def expected(make: Callable[[], Plan]) -> list[Tensor]:
        return [torch.stack(engine.run(make(), request)).double()]

    kinds, contenders = {}, []
    for weights in PACKINGS:
        make = cache(partial(plan, model, weights))
        kinds[str(weights)] = Definition(partial(expected, make), ["tokens"], 0.0)
        contenders.append(Contender(_name(weights), partial(prepared, make), weights, ours=True))
    return Problem(contenders, kinds, STEPS, batch, partial(_remark, model, settings))


@cache  # an export takes seconds, and serves both graphs and all batches
def _exported(settings: Settings, width: int | None) -> tempfile.TemporaryDirectory[str]:
    """Export the model of `step` to a folder, which is removed at the end of the process."""
    from unrolled.interop import onnx

    folder = tempfile.TemporaryDirectory()
    onnx.export(decoder("linear", settings, width).eval(), folder.name, int8=True)
    return folder


def streamed_bytes(model: Decoder, weights: Weights = "fp32") -> int:
    """Count the bytes of weights that every step reads: all but the embedding, of which it reads a row."""
    read = {name: x for name, x in model.named_parameters() if not name.startswith("embedding")}
    return sum(
        x.numel() * GROUP_BYTES[weights] // GROUP if _packed(name, x) else x.nbytes
        for name, x in read.items()
    )


def _packed(name: str, x: Tensor) -> bool:
    """Whether a plan packs these weights."""
    return x.dim() == 2 and not name.startswith("embedding")


def _name(weights: Weights) -> str:
    return f"unrolled, plan in {weights}"


def _rounded_logits(model: Decoder, weights: Weights, tokens: Tensor) -> list[Tensor]:
    found = doubled(model)
    for name, x in found.items():
        if weights != "fp32" and name.startswith("embedding"):
            found[name] = rounded(x, "bf16").double()
        elif _packed(name, x):
            found[name] = rounded(x, weights).double()
    with torch.no_grad():
        return [run_definition(model, found, tokens)]


def _remark(model: Decoder, settings: Settings, medians: Mapping[str, float]) -> str:
    """Compare the times of plans with the times of only reading their weights."""
    parts = []
    for weights in PACKINGS:
        if (median := medians.get(_name(weights))) is not None:
            nbytes = streamed_bytes(model, weights)
            seconds = seconds_to_read(nbytes, settings)
            read = f"{brief_time(seconds)} for {size(nbytes)} in {weights}"
            parts.append(f"{read} (a plan takes {median / seconds:.2f} times as long)")
    return f"Only reading the weights takes {', '.join(parts)}." if parts else ""


def _one_row(problem: Callable[..., Problem]) -> Callable[[int, Settings], Problem]:
    """Make the problem of one sequence at a width."""
    return lambda width, settings: problem(1, settings, width)


WIDE = "a decoder, 8 layers, 8 heads, d_model wide, feed-forward 4 d_model, 256 outcomes, batch 1"
CASES = [
    Case("step", f"One step of {ABOUT}.", "batch", (1, 16), (1, 2), step),
    Case("drawing", f"A token drawn from {ABOUT}, with top-k and top-p.", "batch", (1, 16), (1, 2), drawing),
    Case("wide-step", f"One step of {WIDE}.", "d_model", (512,), (32,), _one_row(step)),
    Case(
        "wide-drawing",
        f"A token drawn from {WIDE}, with top-k and top-p.",
        "d_model",
        (512,),
        (32,),
        _one_row(drawing),
    ),
]
