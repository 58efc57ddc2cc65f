"""A training run as one safetensors file: tensors for weights, optimiser and RNG, JSON for the rest.

The file is replaced atomically. A sharded run writes a folder of such files instead (see `_sharded`). Both
can be resumed on any number of processes. Names of the tensors:

    model.<name>                 parameters and buffers, shared ones once
    average.<name>               their moving averages, if the run has them
    optimizer.<name>.<moment>    optimiser state of a parameter, its step counter included
    carried.<tensor>             the carried states of all rows, if the run has `carry_state`
    rng.cpu, rng.cuda            state of torch's generators, uint8

Its metadata holds one JSON document: the progress, the schedule, and the identity of the run (see `load`).
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from unrolled.files import DIGEST_KEY, load_tensors, read_header, save_tensors
from unrolled.folders import replacing_files
from unrolled.ops.state import raw_bytes
from unrolled.training import _sharded, carrying
from unrolled.training.averaging import tensors_of
from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import Trainable
from unrolled.training.optim import Schedule, ScheduleState
from unrolled.training.processes import ElsewhereError, Processes
from unrolled.training.segments import Continues
from unrolled.training.spread import Spread, local, part_of

FILE = "last.safetensors"
JSON_KEY = "unrolled.training"
START_OVER = "(to start over, use --fresh or remove the run folder)"
CHECKSUMS = ("data.first_batch", "data.first_eval_batch", "data.ids_checksum")
"""What stands for the data in the description of a run."""


@dataclass
class Recent:
    """Sums over the updates since the last line of the log."""

    steps: int = 0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    read: int = 0

    def add(self, loss: float, tokens: int, seconds: float, read: int = 0) -> None:
        """Count one update, with its number of targets and the number of tokens that the model has read."""
        self.steps += 1
        self.loss += loss
        self.tokens += tokens
        self.seconds += seconds
        self.read += read

    @property
    def mean_loss(self) -> float:
        """Mean loss of the updates, in nats per token."""
        return self.loss / self.steps

    @property
    def speed(self) -> float:
        """Tokens that the model has read per second; targets, if its inputs are not tokens."""
        return (self.read or self.tokens) / self.seconds


@dataclass
class Progress:
    """How far a run has come. Losses are in nats per token; None before the first evaluation.

    `evaluated` is the step of the last complete evaluation, so that a run repeats one that was stopped.
    `saved` has the names of the files of the best model.
    """

    step: int = 0
    evaluated: int = 0
    seconds: float = 0.0
    best_val: float | None = None
    last_val: float | None = None
    saved: list[str] = field(default_factory=list)
    recent: Recent = field(default_factory=Recent)


@dataclass
class TrainState:
    """The state of a run, except the global random generators.

    `averaged` is a copy of the model whose weights are moving averages, if the config has `ema`. `spread`
    says how both are spread over `processes`. `carried` is the state from which the rows of this process
    continue, if the config has `carry_state`.
    """

    model: Trainable
    optimizers: list[torch.optim.Optimizer]
    schedule: Schedule
    device: torch.device
    spread: Spread
    processes: Processes
    averaged: Trainable | None = None
    carried: Any = None
    progress: Progress = field(default_factory=Progress)

    def evaluated(self) -> Trainable:
        """Return the model that is evaluated and saved."""
        return self.model if self.averaged is None else self.averaged

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model and of its averages, by their names in a checkpoint."""
        found = {f"model.{name}": x for name, x in tensors_of(self.model).items()}
        if self.averaged is not None:
            found |= {f"average.{name}": x for name, x in tensors_of(self.averaged).items()}
        return found

    def templates(self) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
        """Return a function that makes an empty tensor for one of a checkpoint, sharded as in this run."""
        own, parameters = self.tensors(), dict(self.model.named_parameters())

        def empty(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            parameter = parameters.get(name.removeprefix("optimizer.").rpartition(".")[0])
            like = parameter if name.startswith("optimizer.") else own.get(name)
            if like is None or like.shape != shape:  # such as the step counter of an optimiser
                return torch.empty(shape, dtype=dtype)
            return torch.empty_like(like, dtype=dtype, requires_grad=False)

        return empty


def save(
    run_dir: Path, state: TrainState, identity: Mapping[str, object], metadata: Mapping[str, object]
) -> None:
    """Write a checkpoint into the folder of a run, replacing the one there atomically.

    All processes call it. The first one writes, unless the model is sharded; see `_sharded`.
    """
    tensors = state.tensors()
    for optimizer in state.optimizers:
        names = _parameter_names(optimizer)
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{names[index]}.{key}": x for key, x in moments.items()}
    tensors |= carrying.to_tensors(state.carried, state.processes)
    tensors["rng.cpu"] = torch.get_rng_state()
    if state.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.device)

    document = {
        "progress": asdict(state.progress),
        "schedule": asdict(state.schedule.state),
        "identity": identity,
        "metadata": metadata,
    }
    if state.spread.sharded:
        _sharded.save(run_dir, {n: x.detach() for n, x in tensors.items()}, document, state.processes)
    with state.processes.agreed():
        if state.processes.first and state.spread.sharded:
            (run_dir / FILE).unlink(missing_ok=True)
        elif state.processes.first:
            tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
            with replacing_files(run_dir) as staging:
                save_tensors(tensors, staging / FILE, metadata={JSON_KEY: json.dumps(document)})
            _sharded.remove(run_dir)


def load(run_dir: Path, state: TrainState, identity: Mapping[str, object], free: frozenset[str]) -> bool:
    """Restore `state` and torch's random generators from the last checkpoint in the folder of a run.

    All processes call it; only sharded checkpoints need a folder that each of them sees. A checkpoint of step
    0 that does not match is ignored: nothing is lost, and a failed first attempt must not block a corrected
    second one.

    Args:
        run_dir: the folder that `save` has written to, from any number of processes.
        state: the run to fill, made from the same model class and settings.
        identity: `{"train": ..., "model": ..., "data": ...}`, compared with the saved one.
        free: dotted names of identity fields that may differ.

    Returns:
        Whether the run was restored.

    Raises:
        ValueError: the file is damaged, or belongs to another model, other settings or other data. Nothing
            is changed in this case.
    """
    processes = state.processes
    whole: dict[str, Tensor] = {}  # the tensors of a file, on the first process
    with processes.agreed():
        found = None
        if processes.first and (path := _last(run_dir)) is not None:
            whole, document = _read(path)
            found = path, document, {name: (x.shape, x.dtype) for name, x in whole.items()}
    found = processes.from_first(found)
    if found is None:
        return False
    path, document, shapes = found
    sharded = path.name == _sharded.DOCUMENT
    if sharded:
        shapes = _sharded.shapes_of(run_dir, document, processes)
    try:
        with processes.agreed():
            _check_identity(path, document["identity"], identity, free)
            _check_tensors(path, shapes, tensors_of(state.model))
    except (ValueError, ElsewhereError):
        if document["progress"]["step"] == 0:
            return False
        raise

    if sharded:
        tensors = _sharded.load(run_dir, document, shapes, state.templates(), processes)
    else:
        tensors = whole if processes.alone else _dealt_out(whole, shapes, state)
    _restore(state, tensors, document)
    return True


def ids_checksum(run_dir: Path) -> object:
    """Return the `ids_checksum` of the data in the last checkpoint; None without a checkpoint or checksum."""
    if (path := _last(run_dir)) is None:
        return None
    return flatten(_document(path)["identity"]).get("data.ids_checksum")


def _last(run_dir: Path) -> Path | None:
    """Return the newer of the two files of a checkpoint; both exist only if replacing one was interrupted."""
    found = [x for x in (run_dir / FILE, run_dir / _sharded.DOCUMENT) if x.exists()]
    return max(found, key=lambda file: file.stat().st_mtime_ns, default=None)


def _dealt_out(whole: Mapping[str, Tensor], shapes: _sharded.Shapes, state: TrainState) -> dict[str, Tensor]:
    """Give each process its part of the tensors that the first process has, one tensor after the other."""
    tensors, empty = {}, state.templates()
    for name, (shape, dtype) in shapes.items():
        x = whole[name] if state.processes.first else torch.empty(shape, dtype=dtype)
        state.processes.copy_from_first(x)
        tensors[name] = part_of(x, empty(name, shape, dtype))
    return tensors


def _restore(state: TrainState, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, x in state.tensors().items():
            local(x).copy_(local(tensors[name]))
    moments = _moments(tensors)
    for optimizer in state.optimizers:
        names, restored = enumerate(_parameter_names(optimizer)), optimizer.state_dict()
        restored["state"] = {index: moments[name] for index, name in names if name in moments}
        optimizer.load_state_dict(restored)
    state.schedule.state = ScheduleState(**document["schedule"])
    state.carried = carrying.of_tensors(cast(Continues, state.model), tensors, state.processes)
    progress = document["progress"]
    state.progress = Progress(**progress | {"recent": Recent(**progress["recent"])})
    torch.set_rng_state(tensors["rng.cpu"])
    if state.device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], state.device)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the `metadata` that `train` was given; `path` ends in `last.safetensors` or `last.json`."""
    metadata: dict[str, Any] = _read(path)[1]["metadata"]
    return metadata


def fingerprint(*tensors: Tensor) -> str:
    """Compute a checksum of tensors, as eight hexadecimal digits."""
    total = 0
    for x in tensors:
        total = zlib.crc32(raw_bytes(x).numpy().data, total)
    return f"{total:08x}"


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint, none if it is sharded, and its document."""
    # The tensors first: their digest covers the document.
    tensors = {} if path.name == _sharded.DOCUMENT else load_tensors(path)
    return {name: x.clone() for name, x in tensors.items()}, _document(path)


def _document(path: Path) -> dict[str, Any]:
    """Return the document of a checkpoint; its digest is not checked."""
    if path.name == _sharded.DOCUMENT:
        return _sharded.read_document(path.parent)
    metadata = read_header(path).metadata
    if JSON_KEY not in metadata or DIGEST_KEY not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not a training checkpoint")
    try:
        document: dict[str, Any] = json.loads(metadata[JSON_KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return document


def _parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def _moments(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    moments: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        if key.startswith("optimizer."):
            name, _, moment = key.removeprefix("optimizer.").rpartition(".")
            moments.setdefault(name, {})[moment] = x
    return moments


def _check_tensors(path: Path, found: _sharded.Shapes, expected: Mapping[str, Tensor]) -> None:
    found = {n.removeprefix("model."): shape for n, shape in found.items() if n.startswith("model.")}
    for name, x in expected.items():
        if name not in found:
            raise ValueError(f"{path} is a checkpoint of another model: it has no tensor {name} {START_OVER}")
        if found[name] != (x.shape, x.dtype):
            raise ValueError(
                f"{path} is a checkpoint of another model: its {name} is {_kind(*found[name])}, "
                f"but this model's is {_kind(x.shape, x.dtype)} {START_OVER}"
            )
    if extra := sorted(found.keys() - expected.keys()):
        raise ValueError(
            f"{path} is a checkpoint of another model: it has a tensor {extra[0]} too many {START_OVER}"
        )


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _check_identity(path: Path, found: object, expected: object, free: frozenset[str]) -> None:
    # A setting that did not exist yet when the checkpoint was written counts as its default.
    before, now = flatten({"train": asdict(TrainConfig())}) | flatten(found), flatten(expected)
    names = sorted((before.keys() | now.keys()) - free)
    changed = [name for name in names if before.get(name) != now.get(name)]
    for name in changed:
        if name not in CHECKSUMS:  # a changed setting often changes these too
            raise ValueError(
                f"{path} cannot be resumed: {name} was {before.get(name)!r} and is now {now.get(name)!r} "
                f"{START_OVER}"
            )
    if changed:
        raise ValueError(f"{path} cannot be resumed: the data have changed {START_OVER}")


def flatten(value: object) -> dict[str, object]:
    """Return the leaves of nested dicts in their JSON form, by their path, such as `"train.lr"`."""
    return _flattened(json.loads(json.dumps(value)), "")


def _flattened(value: object, prefix: str) -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flattened(part, f"{prefix}.{key}".strip(".")) for key, part in value.items()]
    return {name: x for part in parts for name, x in part.items()}
