"""A model's recurrence as an exportable function of flat tensors, and the description of its state."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from unrolled.attention.linear import LinearAttention
from unrolled.contract import Recurrent, UnsupportedError
from unrolled.models.perceiver_ar import PerceiverAR
from unrolled.ops.softmax import KVCache
from unrolled.ops.tracing import without_shape_cache

POSITION = "position"
Length = Literal["any", 1]
State = tuple[object, ...]
Features = Callable[[Tensor, Tensor | None], Tensor]


class Leaf(NamedTuple):
    """One tensor of a state.

    Attributes:
        name: path of the tensor in the state, such as "layers.0.kv".
        dtype: dtype of the tensor.
        shape: shape without the batch axis, which comes first; a growing axis counts as 0.
        growing_axis: the axis that grows by one with each token read, counted with the batch axis; None if no
            axis grows.
        fill: value of all elements before the first token.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    growing_axis: int | None
    fill: float

    def initial(self, batch_size: int, past: int = 0) -> Tensor:
        """Return the tensor before the first token; with `past`, in its size after `past` tokens."""
        sizes = [batch_size, *self.shape]
        if self.growing_axis is not None:
            sizes[self.growing_axis] = past
        return torch.full(sizes, self.fill, dtype=self.dtype)


class Recurrence(nn.Module):
    """`(tokens [B,T], *state) -> (logits [B,T,V], *state, *probes)`, with tensors only.

    A cache of keys and values has its simplest form, `past_k` and `past_v`, without padding. The position,
    which every layer counts separately, is passed only once.

    Args:
        model: a model with `init_state`, `prefill` and `step`, in fp32.
        length: "any" reads T tokens in parallel; 1 reads one token by `step`.
        probes: also return the features of the queries `[B,T,H,R]` of each layer of linear attention.

    Raises:
        UnsupportedError: the model has no recurrent form, its state does not have this form, or its first
            call reads tokens in another way than later ones, as a `PerceiverAR` with a prefix does.
    """

    def __init__(self, model: Any, *, length: Length = "any", probes: bool = False) -> None:
        super().__init__()
        if isinstance(model, PerceiverAR):
            limit, n_latents = model.config.n_positions, model.config.n_latents
            if limit is None or n_latents < limit:
                bound = limit or f"which positions {model.config.positions!r} do not limit"
                raise UnsupportedError(
                    "an exported graph reads every token as a latent, but a PerceiverAR only the last "
                    f"n_latents tokens of its first call; n_latents is {n_latents}, but must be at least the "
                    f"number of positions, {bound}"
                )
        self.model, self.length = model, length
        self.template: State = model.init_state(1)
        self.leaves, self._shared = _describe(model)
        self.probed = _linear_layers(model) if probes else {}

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Read tokens that follow the state."""
        before = self._unflatten(tokens.shape[0], state)
        seen: list[Tensor] = []
        with _features_of_queries(self.probed.values(), seen):
            if self.length == "any":
                logits, after = self.model.prefill(tokens, before)
            else:
                logits, after = self.model.step(tokens[:, 0], before)
                logits = logits.unsqueeze(1)
        if self.length == 1:
            seen = [x if x.dim() == 4 else x.unsqueeze(1) for x in seen]
        return (logits, *(x for name, x in _named(after) if name not in self._shared), *seen)

    def example(self, batch_size: int, length: int, past: int) -> tuple[Tensor, ...]:
        """Make arguments with these sizes, for tracing."""
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        return (tokens, *(leaf.initial(batch_size, past) for leaf in self.leaves))

    def _unflatten(self, batch_size: int, state: tuple[Tensor, ...]) -> State:
        found = dict(zip((leaf.name for leaf in self.leaves), state, strict=True))
        found |= dict.fromkeys(self._shared, found[POSITION]) if self._shared else {}
        return _filled(self.template, "", found, batch_size)


@torch.no_grad()
def exported(recurrence: Recurrence) -> ExportedProgram:
    """Trace a recurrence with `torch.export`; batch, length and past are dynamic where they can vary."""
    arguments = recurrence.example(2, 3 if recurrence.length == "any" else 1, 4)
    # Tracing assumes dynamic sizes of 2 or more; the caller tests that 0 and 1 work too.
    batch, length, past = (Dim(name, min=2) for name in ("batch", "length", "past"))
    state = tuple(
        {0: batch} | ({leaf.growing_axis: past} if leaf.growing_axis is not None else {})
        for leaf in recurrence.leaves
    )
    tokens = {0: batch, 1: length} if recurrence.length == "any" else {0: batch}
    with quiet(), without_shape_cache():
        return torch.export.export(recurrence, arguments, dynamic_shapes=(tokens, state))


def _named(state: State, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a state with its path; caches have their simplest form."""
    if isinstance(state, KVCache):
        for name in ("k", "v"):
            parts = [getattr(state, f"{part}_{name}") for part in ("past", "recent")]
            yield f"{path}past_{name}", parts[0] if parts[1].shape[2] == 0 else torch.cat(parts, 2)
        yield f"{path}{POSITION}", state.position
        return
    names = getattr(state, "_fields", range(len(state)))
    for name, part in zip(names, state, strict=True):
        if isinstance(part, Tensor):
            yield f"{path}{name}", part
        elif isinstance(part, tuple):
            yield from _named(part, f"{path}{name}.")


def _filled(template: State, path: str, found: dict[str, Tensor], batch_size: int) -> State:
    """Make a state with the structure of `template` from tensors by their names in `_named`."""
    if isinstance(template, KVCache):
        k, v = found[f"{path}past_k"], found[f"{path}past_v"]
        padding = torch.zeros(batch_size, k.shape[2], dtype=torch.bool, device=k.device)
        nothing = (k.new_empty(*k.shape[:2], 0, k.shape[3]), v.new_empty(*v.shape[:2], 0, v.shape[3]))
        return KVCache(k, v, padding, *nothing, padding.new_empty(batch_size, 0), found[f"{path}{POSITION}"])
    names = getattr(template, "_fields", range(len(template)))
    parts = [
        _filled(part, f"{path}{name}.", found, batch_size)
        if isinstance(part, tuple)
        else found[f"{path}{name}"]
        for name, part in zip(names, template, strict=True)
    ]
    make: Callable[[Iterable[object]], State] = getattr(template, "_make", type(template))
    return make(parts)


@torch.no_grad()
def _describe(model: Recurrent) -> tuple[list[Leaf], set[str]]:
    """Describe the tensors of a state, seen after 0 to 2 tokens, and name those that repeat the position."""
    states: list[State] = [model.init_state(1)]
    for _ in range(2):
        _, after = model.step(torch.zeros(1, dtype=torch.long), states[-1])
        states.append(after)
    first, *later = (dict(_named(state)) for state in states)
    leaves, shared = [], set()
    for name, x in first.items():
        forms = [x, *(state[name] for state in later)]
        counts = name.endswith(f".{POSITION}") and POSITION in first
        if counts and all(torch.equal(a[name], a[POSITION]) for a in (first, *later)):
            shared.add(name)
            continue
        fill = x.flatten()[0].item() if x.numel() else 0
        if not bool((x == fill).all()):
            raise UnsupportedError(
                f"the initial state {name} is not constant, but must be for an export; "
                "use linear, window or softmax attention"
            )
        leaves.append(Leaf(name, x.dtype, tuple(x.shape[1:]), _growing_axis(name, forms), fill))
    return leaves, shared


def _growing_axis(name: str, forms: list[Tensor]) -> int | None:
    """Return the axis whose size is 0, 1 and 2 after 0, 1 and 2 tokens; None if no axis grows."""
    shapes = [x.shape for x in forms]
    if shapes[0] == shapes[1] == shapes[2]:
        return None
    grown = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if sizes == (0, 1, 2)]
    if len(grown) != 1 or sum(len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)) != 1:
        raise UnsupportedError(
            f"the state {name} grows from {list(shapes[0])} to {list(shapes[2])} in two tokens, but must be "
            "empty at first, and grow by one per token along one axis, as that of softmax attention"
        )
    return grown[0]


def _linear_layers(model: nn.Module) -> dict[int, LinearAttention]:
    """Return the layers of linear attention in a stack, by their index.

    Not those with rotary positions: they rotate the features of a query before it reads the state.
    """
    blocks = getattr(getattr(model, "stack", None), "blocks", ())
    found = ((i, getattr(block, "attention", None)) for i, block in enumerate(blocks))
    return {i: layer for i, layer in found if isinstance(layer, LinearAttention) and not layer.rotary}


@contextmanager
def _features_of_queries(layers: Iterable[LinearAttention], seen: list[Tensor]) -> Iterator[None]:
    """Record the outputs of `phi_q` of each layer."""
    with ExitStack() as undo:
        for layer in layers:
            phi = layer.feature_map

            def record(q: Tensor, positions: Tensor | None = None, *, phi_q: Features = phi.phi_q) -> Tensor:
                features = phi_q(q, positions)
                seen.append(features)
                return features

            vars(phi)["phi_q"] = record
            undo.callback(delattr, phi, "phi_q")
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of the exporter and the quantiser, which do not concern users."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
