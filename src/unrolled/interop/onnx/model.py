"""An exported model in ONNX Runtime, with the interface that `unrolled.generation` needs."""

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.extras import how_to_install
from unrolled.interop.onnx.graph import POSITION
from unrolled.interop.onnx.manifest import Manifest
from unrolled.models.checks import check_ids
from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.options import check_batch_size
from unrolled.threads import MAX_THREADS

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

PIECE = 32  # tokens of a prompt per call; the time and memory of a call are quadratic in them
State = tuple[Tensor, ...]


class ExportedConfig(NamedTuple):
    """The config fields that sampling needs."""

    vocab_size: int
    start_token: bool
    n_positions: int | None


class ExportedModel(ABC):
    """A recurrence outside PyTorch: `init_state`, `prefill` and `step`, on the CPU, without gradients.

    A state is a `NamedTuple` of tensors, batch first, so that `unrolled.ops.state` can select its rows, and
    save and load it. States are never modified in place.

    Args:
        manifest: the manifest of the exported folder.
        piece: maximum number of tokens per call.
    """

    def __init__(self, manifest: Manifest, piece: int) -> None:
        self.manifest, self._piece = manifest, piece
        self.config = ExportedConfig(
            manifest.vocab_size, manifest.start_token is not None, manifest.max_positions
        )
        self._fields = tuple(leaf.name.replace(".", "_") for leaf in manifest.state)
        make: Callable[..., Callable[..., State]] = namedtuple
        self._state_type = make("ExportedState", self._fields)

    @abstractmethod
    def _call(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the graph on tokens and a state; return logits and the next state."""

    def init_state(self, batch_size: int) -> State:
        """Return the state of `batch_size` empty sequences.

        Raises:
            ValueError: `batch_size` is no whole number of at least 0.
        """
        check_batch_size(batch_size)
        return self._state_type(*(leaf.initial(batch_size) for leaf in self.manifest.state))

    def prefill(
        self, tokens: Tensor, state: State, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Read tokens [B, T], where B and T are at least 1, that follow `state`.

        With a `key_padding_mask` [B, T] (True = padding), each row is read separately without its padding;
        logits at padding are meaningless.

        Returns:
            Logits [B, T, vocab_size] and the new state.

        Raises:
            ValueError: an id is outside the vocabulary, the state is of another model or batch size, or there
                are more tokens than the model has positions.
            UnsupportedError: rows have different lengths, and the state grows with the length.
        """
        check_ids("tokens", tokens, self.config.vocab_size + self.config.start_token)
        self._check_state(state, tokens.shape[0])
        if tokens.numel() < 1:
            raise ValueError(
                f"tokens has shape {list(tokens.shape)}, but must have at least one token and row"
            )
        if key_padding_mask is None:
            return self._read(tokens, state)
        check_key_padding_mask(key_padding_mask, *tokens.shape)
        return self._read_rows(tokens, state, ~key_padding_mask)

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token [B] per row; return logits [B, vocab_size] and the new state."""
        logits, state = self.prefill(token.unsqueeze(-1), state)
        return logits[:, -1], state

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_room(state, tokens.shape[1])
        pieces = []
        for piece in torch.split(tokens, self._piece, dim=1):
            logits, *after = self._call((piece, *state))
            pieces.append(logits)
            state = self._state_type(*after)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1), state

    def _read_rows(self, tokens: Tensor, state: State, valid: Tensor) -> tuple[Tensor, State]:
        growing = any(leaf.growing_axis is not None for leaf in self.manifest.state)
        if growing and len(set(valid.sum(1).tolist())) > 1:
            raise UnsupportedError(
                "rows of different lengths cannot share a state that grows with the length; "
                "batch prompts of equal length, or read each separately"
            )
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        rows = []
        for row in range(len(tokens)):
            before = self._state_type(*(x[row : row + 1] for x in state))
            if valid[row].any():
                found, before = self._read(tokens[row : row + 1, valid[row]], before)
                logits[row, valid[row]] = found[0]
            rows.append(before)
        return logits, self._state_type(*map(torch.cat, zip(*rows, strict=True)))

    def _check_room(self, state: State, length: int) -> None:
        bound = self.config.n_positions
        if bound is None or not len(state[0]):
            return
        for leaf, x in zip(self.manifest.state, state, strict=True):
            if leaf.name == POSITION and (reached := int(x.max()) + length) > bound:
                raise ValueError(f"the length is {reached}, but must be at most {bound}")

    def _check_state(self, state: State, batch_size: int) -> None:
        leaves = self.manifest.state
        if not isinstance(state, tuple) or getattr(state, "_fields", None) != self._fields:
            raise ValueError(f"state is a {type(state).__name__} of another model, but must be this one's")
        for leaf, x in zip(leaves, state, strict=True):
            expected = [batch_size, *leaf.shape]
            if leaf.growing_axis is not None and x.dim() == len(expected):
                expected[leaf.growing_axis] = x.shape[leaf.growing_axis]
            if list(x.shape) != expected or x.dtype != leaf.dtype:
                raise ValueError(
                    f"state {leaf.name} is {x.dtype} of shape {list(x.shape)}, "
                    f"but must be {leaf.dtype} of shape {expected}"
                )


class OnnxModel(ExportedModel):
    """An exported model in ONNX Runtime."""

    def __init__(self, manifest: Manifest, session: "InferenceSession") -> None:
        super().__init__(manifest, PIECE if manifest.length == "any" else 1)
        self._session = session

    def _call(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = zip(self.manifest.inputs, inputs, strict=True)
        feeds = {name: x.detach().contiguous().numpy() for name, x in given}
        return [torch.from_numpy(x) for x in self._session.run(self.manifest.outputs, feeds)]


def load(folder: str | Path, graph: str = "plain", *, threads: int = 1) -> OnnxModel:
    """Load an exported folder in ONNX Runtime, after verifying the hashes of its files.

    Args:
        folder: a folder written by `export`.
        graph: "plain", or "fused" or "int8" if exported.
        threads: threads per operator; one is fastest for a step of a small model.

    Raises:
        ValueError: the folder is not an export, lacks the graph, or has a file that does not match its hash.
        ImportError: onnxruntime is missing.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if graph not in manifest.graphs:
        again = f"; export again with --{graph}" if graph in ("fused", "int8") else ""
        raise ValueError(f"graph is {graph!r}, but {folder} holds {', '.join(manifest.graphs)}{again}")
    for name in manifest.files:
        manifest.read(folder, name)
    file = manifest.graphs[graph]["file"]
    session = open_session(manifest.read(folder, file), threads)
    shapes = {x.name: len(x.shape) for x in session.get_inputs()}
    expected = {"tokens": 2} | {leaf.name: 1 + len(leaf.shape) for leaf in manifest.state}
    if shapes != expected or not {x.name for x in session.get_outputs()}.issuperset(manifest.outputs):
        raise ValueError(f"{folder / file} has other inputs or outputs than its manifest; export again")
    return OnnxModel(manifest, session)


def open_session(content: bytes, threads: int = 1) -> "InferenceSession":
    """Open the bytes of a graph on the CPU, with this number of threads per operator."""
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads is {threads}, but must be from 1 to {MAX_THREADS}")
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"running an exported model needs onnxruntime, which is missing: {how_to_install('onnx')}"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
