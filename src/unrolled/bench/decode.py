"""Cases of generation: steps and prompts by plans, layer by layer and by other libraries; drawn tokens."""

import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.bench import llama_cpp, measure, rwkv
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings
from unrolled.bench.machine import seconds_to_read
from unrolled.bench.models import (
    ABOUT,
    attention_operations,
    decoder,
    doubled,
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
from unrolled.threads import cpu_threads

STEPS = 64
PROMPT = 512  # tokens, as llama.cpp measures by default
LAST = {"logits_to_keep": 1}
RWKV_FORMS: tuple[Weights, ...] = ("fp32", "int8")  # forms in which plans of RWKV-7 are measured
# Largest error, relative to the largest logit, of forms in which the inputs of a matrix are rounded too: with
# int8 to 16 bits, with the others to 8 bits, and with bf16 on some processors only.
TOLERANCES = {"bf16": 2e-2, "int8": 2e-3, "int4": 0.2, "ONNX Runtime int8": 0.2}

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
Run = Callable[[], list[Tensor]]


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

    def layers() -> Run:
        return partial(generated, model.step, partial(model.init_state, batch))

    def planned(model: Decoder, weights: Weights) -> Run:
        made = plan(model, weights)
        return partial(generated, made.step, partial(made.init_state, batch))

    def idiap() -> Run:
        encoder = idiap_encoder(model, recurrent=True).eval()

        def advance(token: Tensor, state: Any) -> tuple[Tensor, Any]:
            hidden, state = encoder(model.embedding(token), state)
            return model.head(hidden), state

        return partial(generated, advance, lambda: None)

    def onnx(graph: str) -> Run:
        from unrolled.interop import onnx

        loaded = onnx.load(_exported(settings, width).name, graph, threads=settings.threads)
        return partial(generated, loaded.step, partial(loaded.init_state, batch))

    twin = _rwkv_decoder(model, settings)
    shape = _rwkv_shape(twin)
    operations = batch * (matmuls(model) + attention_operations(model, 1, gradients=False))
    moved = streamed_bytes(model) + 2 * nbytes(model.init_state(batch))
    kinds = _definitions(model, twin, tokens, STEPS)
    kinds["fp32"] = replace(kinds["fp32"], flops=operations, nbytes=moved)
    llama = partial(llama_cpp.steps, shape, tokens=tokens, threads=settings.threads)
    contenders = _readers(model, twin, planned, layers, idiap, onnx, llama)
    return Problem(contenders, kinds, STEPS, batch, partial(_remark, model, settings))


def prompt(length: int, settings: Settings, width: int | None = None) -> Problem:
    """Read a prompt of `length` tokens from an empty state; the result is the logits after the last one."""
    model = decoder("linear", settings, width).eval()
    tokens = measure.random_tokens(model, length)

    @torch.inference_mode()
    def read(reader: Any, options: Mapping[str, int]) -> list[Tensor]:
        logits, _ = reader.prefill(tokens, reader.init_state(1), **options)
        return [logits[:, -1:]]

    def layers() -> Run:
        return partial(read, model, LAST)

    def planned(model: Decoder, weights: Weights) -> Run:
        return partial(read, plan(model, weights), LAST)

    def idiap() -> Run:
        from fast_transformers.masking import TriangularCausalMask

        encoder, mask = idiap_encoder(model, recurrent=False).eval(), TriangularCausalMask(length)

        @torch.inference_mode()
        def run() -> list[Tensor]:
            return [model.head(encoder(model.embedding(tokens), attn_mask=mask)[:, -1:])]

        return run

    def onnx(graph: str) -> Run:
        from unrolled.interop import onnx

        return partial(read, onnx.load(_exported(settings, width).name, graph, threads=settings.threads), {})

    twin = _rwkv_decoder(model, settings)
    shape = _rwkv_shape(twin)
    operations = length * matmuls(model) + attention_operations(model, length, gradients=False)
    kinds = _definitions(model, twin, tokens, 1)
    kinds["fp32"] = replace(kinds["fp32"], flops=operations)
    llama = partial(llama_cpp.prompt, shape, tokens=tokens, threads=settings.threads)
    contenders = _readers(model, twin, planned, layers, idiap, onnx, llama)
    return Problem(contenders, kinds, tokens=length)


def drawing(batch: int, settings: Settings, width: int | None = None) -> Problem:
    """Draw `STEPS` tokens of each of `batch` sequences with top-k and top-p."""
    model = decoder("linear", settings, width).eval()
    prompts = [[row] for row in range(batch)]
    options: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "temperature": 0.8, "seed": 0}

    request = Request.of(model.config, prompts, STEPS, **options)

    def prepared(make: Callable[[], Plan]) -> Run:
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


def _rwkv_decoder(model: Decoder, settings: Settings) -> Decoder:
    """Make a decoder of RWKV-7 that is as deep and as wide as another, with heads as wide as llama.cpp's."""
    width = model.config.d_model
    twin = decoder("rwkv7", settings, width, heads=max(1, width // llama_cpp.HEAD)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, x in twin.named_parameters():  # those that are 0 at first would check nothing
        if name.endswith(("decay_up.weight", "rate_up.weight", "bonus")):
            x.data.copy_(torch.randn(x.shape, generator=generator) / 10)
    return twin


def _rwkv_shape(twin: Decoder) -> rwkv.Shape:
    """The sizes of llama.cpp's RWKV-7 that match a decoder of RWKV-7."""
    config = twin.config
    head = config.d_model // config.n_heads
    return rwkv.Shape(config.n_layers, config.d_model, head, config.vocab_size)


def _readers(
    model: Decoder,
    twin: Decoder,
    planned: Callable[[Decoder, Weights], Run],
    layers: Callable[[], Run],
    idiap: Callable[[], Run],
    onnx: Callable[[str], Run],
    llama: Callable[..., Run],
) -> list[Contender]:
    """Everything that reads tokens; each function prepares a run.

    Args:
        model, twin: decoders of linear attention and of RWKV-7.
        planned: by a plan of a decoder, with weights in some form.
        layers, idiap: by `model`, layer by layer, and by fast-transformers with the weights of `model`.
        onnx: by a graph of our export of `model`.
        llama: by llama.cpp, with weights in the form `form`.
    """
    return [
        *(Contender(_name(w), partial(planned, model, w), w, ours=True) for w in PACKINGS),
        Contender("unrolled, layer by layer", layers, "fp32", ours=True),
        Contender("fast-transformers", idiap, "fp32"),
        Contender("ONNX Runtime, our export", partial(onnx, "plain"), "fp32"),
        Contender("ONNX Runtime int8, our export", partial(onnx, "int8"), "ONNX Runtime int8"),
        *(
            Contender(f"{_name(w)}, RWKV-7", partial(planned, twin, w), f"RWKV-7 {w}", ours=True)
            for w in RWKV_FORMS
        ),
        *(
            Contender(f"llama.cpp, RWKV-7 in {form}", partial(llama, form=form), f"llama.cpp {form}")
            for form in llama_cpp.TOLERANCES
        ),
    ]


def _definitions(model: Decoder, twin: Decoder, tokens: Tensor, last: int) -> dict[str, Definition]:
    """Define the logits after each of the last `last` tokens, for every model and form of the weights."""
    names, exact, shape = ["logits"], rounding_bound(model, tokens.shape[1]), _rwkv_shape(twin)

    @cache  # that of fp32 also serves ONNX Runtime in int8
    def of_model(weights: Weights) -> list[Tensor]:
        return [_rounded_logits(model, weights, tokens)[:, -last:]]

    def of_twin(weights: Weights) -> list[Tensor]:
        copy = deepcopy(twin).double()
        copy.load_state_dict(_rounded(twin, weights))
        with torch.no_grad(), cpu_threads(1):
            return [copy(tokens)[:, -last:]]

    @cache  # it serves all forms
    def of_llama_cpp() -> list[Tensor]:
        with cpu_threads(1):  # more threads only make such small steps slower, most of all on a busy machine
            return [rwkv.definition(rwkv.random_weights(shape), shape, tokens)[:, -last:]]

    found = {
        str(weights): Definition(partial(of_model, weights), names, TOLERANCES.get(weights, exact))
        for weights in PACKINGS
    }
    for form in RWKV_FORMS:
        found[f"RWKV-7 {form}"] = Definition(partial(of_twin, form), names, TOLERANCES.get(form, exact))
    found["ONNX Runtime int8"] = replace(found["fp32"], tolerance=TOLERANCES["ONNX Runtime int8"])
    for name, allowed in llama_cpp.TOLERANCES.items():
        found[f"llama.cpp {name}"] = Definition(of_llama_cpp, names, allowed)
    return found


@cache  # an export takes seconds, and serves both graphs and all batches
def _exported(settings: Settings, width: int | None) -> tempfile.TemporaryDirectory[str]:
    """Export the model of `step` and `prompt` to a folder, which is removed at the end of the process."""
    from unrolled.interop import onnx

    folder = tempfile.TemporaryDirectory()
    onnx.export(decoder("linear", settings, width).eval(), folder.name, int8=True)
    return folder


def streamed_bytes(model: Decoder, weights: Weights = "fp32") -> int:
    """Count the bytes of weights that every step reads: all but the embedding, of which it reads a row."""
    read = {name: x for name, x in model.named_parameters() if not name.startswith("embedding")}
    packed = _matrices(model)
    return sum(
        x.numel() * GROUP_BYTES[weights] // GROUP if name in packed else x.nbytes for name, x in read.items()
    )


def _matrices(model: Decoder) -> set[str]:
    """The names of the weights that a plan packs."""
    return {f"{name}.weight" for name, x in model.named_modules() if isinstance(x, nn.Linear)}


def _name(weights: Weights) -> str:
    return f"unrolled, plan in {weights}"


def _rounded_logits(model: Decoder, weights: Weights, tokens: Tensor) -> Tensor:
    """Compute the logits in fp64 with the weights that a plan has."""
    with torch.no_grad():
        return run_definition(model, _rounded(model, weights), tokens)


def _rounded(model: Decoder, weights: Weights) -> dict[str, Tensor]:
    """Return the weights of a model in fp64, rounded as in a plan."""
    found, packed = doubled(model), _matrices(model)
    for name, x in found.items():
        if weights != "fp32" and name.startswith("embedding"):
            found[name] = rounded(x, "bf16").double()
        elif weights != "fp32" and name in packed:
            found[name] = rounded(x, weights).double()
    return found


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


def _one_prompt(width: int, settings: Settings) -> Problem:
    """Make the problem of a prompt at a width."""
    return prompt(PROMPT, settings, width)


WIDE = "a decoder, 8 layers, 8 heads, d_model wide, feed-forward 4 d_model, 256 outcomes, batch 1"
CASES = [
    Case("step", f"One step of {ABOUT}.", "batch", (1, 16), (1, 2), step),
    Case("drawing", f"A token drawn from {ABOUT}, with top-k and top-p.", "batch", (1, 16), (1, 2), drawing),
    Case("prompt", f"A prompt of N tokens, read by {ABOUT}, batch 1.", "N", (PROMPT, 4096), (8, 16), prompt),
    Case("wide-step", f"One step of {WIDE}.", "d_model", (512,), (32,), _one_row(step)),
    Case(
        "wide-drawing",
        f"A token drawn from {WIDE}, with top-k and top-p.",
        "d_model",
        (512,),
        (32,),
        _one_row(drawing),
    ),
    Case(
        "wide-prompt",
        f"A prompt of {PROMPT} tokens, read by {WIDE}.",
        "d_model",
        (512,),
        (32,),
        _one_prompt,
    ),
]
