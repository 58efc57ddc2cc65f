"""Cases of whole decoders: a step at a position, and training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unrolled.bench import definitions, flops, measure
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings, tolerance
from unrolled.bench.peer_models import idiap_encoder, idiap_names
from unrolled.models import Decoder, DecoderConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 256,
    "n_layers": 8,
    "n_heads": 8,
    "d_ff": 1024,
    "norm": "post",  # as in pytorch-fast-transformers, so that it can run the same weights
    "positions": "none",
}
ABOUT = "a decoder, 8 layers, 8 heads, 256 wide, feed-forward 1,024, 256 outcomes"
TINY = {"vocab_size": 8, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32}  # for a quick run
STEPS = 64
ROUNDINGS = 4  # parts of a layer that round one after the other: attention, feed-forward and two norms


def position(length: int, settings: Settings) -> Problem:
    """Generate after `length` tokens, with linear attention and with softmax and its cache."""
    contenders, kinds = [], {}
    for attention in ("linear", "softmax"):
        model = decoder(attention, settings).eval()
        tokens = measure.random_tokens(model, length + measure.WINDOW)

        def prepare(model: Decoder = model) -> Callable[[], list[Tensor]]:
            with torch.inference_mode():
                task = measure.stepping(model)(length)

            @torch.inference_mode()
            def run() -> list[Tensor]:
                logits: Any = task.run()
                return [logits]

            return run

        def last(model: Decoder = model, tokens: Tensor = tokens) -> list[Tensor]:
            return [x[:, -1] for x in exact_logits(model, tokens)]

        kinds[attention] = Definition(last, ["logits"], rounding_bound(model, length))
        contenders.append(Contender(f"unrolled {attention}", prepare, attention, ours=True))
    return Problem(contenders, kinds, steps=measure.WINDOW, tokens=1)


def training(length: int, settings: Settings) -> Problem:
    """Run the loss of one sequence and its gradient, with linear attention and with softmax."""
    pairs = [_our_training(attention, length, settings) for attention in ("linear", "softmax")]
    kinds = {contender.definition: definition for contender, definition in pairs}
    contenders = [*(contender for contender, _ in pairs), _idiap_training(settings, length)]
    return Problem(contenders, kinds, tokens=length)


def _our_training(attention: str, length: int, settings: Settings) -> tuple[Contender, Definition]:
    model = decoder(attention, settings)
    tokens = measure.random_tokens(model, length + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def ours() -> Callable[[], Sequence[Tensor]]:
        parameters = list(model.parameters())
        return lambda: _with_gradients(model.loss(inputs, targets), parameters)

    def compute() -> Sequence[Tensor]:
        weights = doubled(model)
        logits = run_definition(model, weights, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return _with_gradients(loss, list(weights.values()))

    names = ["loss", *(f"the gradient of {name}" for name, _ in model.named_parameters())]
    operations = 3 * length * matmuls(model) + attention_operations(model, length, gradients=True)
    definition = Definition(compute, names, rounding_bound(model, length), operations)
    return Contender(f"unrolled {attention}", ours, attention, ours=True), definition


def _with_gradients(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def _idiap_training(settings: Settings, length: int) -> Contender:
    model = decoder("linear", settings)
    tokens = measure.random_tokens(model, length + 1)

    def prepare() -> Callable[[], Sequence[Tensor]]:
        from fast_transformers.masking import TriangularCausalMask

        encoder, mask = idiap_encoder(model, recurrent=False), TriangularCausalMask(length)
        theirs = dict(encoder.named_parameters())
        own = {name: x for name, x in model.named_parameters() if not name.startswith("stack")}

        def run() -> Sequence[Tensor]:
            hidden = encoder(model.embedding(tokens[:, :-1]), attn_mask=mask)
            loss = F.cross_entropy(model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
            detached, *found = _with_gradients(loss, [*own.values(), *theirs.values()])
            gradients = dict(zip([*own, *theirs], found, strict=True))
            ordered = (
                gradients[name] if name in own else torch.cat([gradients[x] for x in idiap_names(name)])
                for name, _ in model.named_parameters()
            )
            return [detached, *ordered]

        return run

    return Contender("fast-transformers", prepare, "linear")


def decoder(
    attention: str,
    settings: Settings,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
) -> Decoder:
    """Make the decoder of a case, with random weights, and with other sizes if they are given."""
    shape = SHAPE | TINY if settings.quick else SHAPE
    if width is not None:
        shape = shape | {"d_model": width, "d_ff": 4 * width}
    if layers is not None:
        shape = shape | {"n_layers": layers}
    if heads is not None:
        shape = shape | {"n_heads": heads}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(DecoderConfig(attention=attention, **shape)).to(settings.device)


def doubled(model: Decoder) -> dict[str, Tensor]:
    """Copy the weights to fp64."""
    return {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}


def run_definition(model: Decoder, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Compute the logits with these weights by the definition, which shares no code with the model."""
    config = model.config
    softmax = config.attention == "softmax"
    return definitions.decoder(weights, tokens, config.n_layers, config.n_heads, softmax)


def exact_logits(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Compute the logits in fp64."""
    with torch.no_grad():
        return [run_definition(model, doubled(model), tokens)]


def rounding_bound(model: Decoder, length: int) -> float:
    """Bound the error of fp32 after `length` tokens."""
    config = model.config
    return tolerance(torch.float32, (length + config.ff_width) * ROUNDINGS * config.n_layers)


def matmuls(model: Decoder) -> int:
    """Count the operations of the matrix products for a token."""
    config = model.config
    return flops.decoder_matmuls(config.d_model, config.ff_width, config.n_layers, config.vocab_size)


def attention_operations(model: Decoder, length: int, *, gradients: bool) -> int:
    """Count the operations of the attention."""
    config = model.config
    per_head = flops.of_head(str(config.attention), length, config.d_model // config.n_heads, gradients)
    return config.n_layers * config.n_heads * per_head


CASES = [
    Case(
        "position",
        f"A step of {ABOUT}, batch 1, after N tokens: linear attention against softmax.",
        "N",
        (100, 1000, 4000),
        (8, 16),
        position,
    ),
    Case(
        "training",
        f"The loss of one sequence and its gradient in {ABOUT}: linear attention against softmax.",
        "N",
        (784, 4096),
        (16, 32),
        training,
        memory=True,
    ),
]
