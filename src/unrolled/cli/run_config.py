"""What a run is: a YAML file and `key=value` overrides, checked key by key and completed from the data set.

    data:  {name: digits}                      a data set and its options
    model: {n_layers: 4, attention: linear}    fields of its config, and the `name` of its kind, by default
                                               the first that `JOBS` has for the task of the data set
    train: {steps: 2000}                       fields of `TrainConfig`
    run_dir: runs/digits                       the folder of the run

A resolved run writes all of it, defaults included, to `run_dir/run.yaml`, which is itself such a file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from unrolled import data
from unrolled.files import write_atomically
from unrolled.models import KINDS
from unrolled.training import TrainConfig

SECTIONS = ("data", "model", "train", "run_dir")
FILE_NAME = "run.yaml"


@dataclass(frozen=True)
class Job:
    """What a task asks for.

    Attributes:
        kinds: names of the models that can do it, the one to take by default first.
        from_data: fields of their configs that come from the data set, for those that have them.
        unit: what the loss is the mean over, as reports call it; see `unit`.
    """

    kinds: tuple[str, ...]
    from_data: tuple[str, ...]
    unit: str


JOBS: dict[data.Task, Job] = {
    "tokens": Job(("decoder", "perceiver_ar", "recurrent_lm"), ("vocab_size", "start_token"), "nats/token"),
    "labels": Job(("encoder", "perceiver", "perceiver_io"), ("vocab_size", "n_classes"), "nats/label"),
    "translation": Job(
        ("encoder_decoder", "rnn_seq2seq", "luong_seq2seq", "lstmn_seq2seq", "deep_lstmn_seq2seq"),
        ("vocab_size", "source_vocab_size", "start_token"),
        "nats/token",
    ),
    "answers": Job(("memory_network", "memnn"), ("vocab_size", "memory_size"), "nats/answer"),
    "bits": Job(("ntm",), ("input_size", "output_size"), "nats/bit"),
    "numbers": Job(("ntm_numbers",), ("input_size", "output_size"), "mean squared error"),
}


def unit(task: data.Task, kind: type[Any]) -> str:
    """Return what reports call the loss of a kind of model: that of its task, or its own `loss_unit`."""
    return str(getattr(kind, "loss_unit", JOBS[task].unit))


@dataclass
class Run:
    """A resolved run: everything known, nothing trained yet."""

    run_dir: Path
    dataset: data.Dataset
    data: dict[str, Any]
    kind: type[Any]  # of the model
    model: Any  # the config of that kind
    train: TrainConfig

    def save(self) -> None:
        """Write `run_dir/run.yaml`, making the folder.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        model = {"name": self.kind.model_name} | asdict(self.model)
        sections = {"data": self.data, "model": model, "train": asdict(self.train)}
        text = yaml.safe_dump(
            _plain(sections | {"run_dir": self.run_dir}), sort_keys=False, allow_unicode=True
        )
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(self.run_dir / FILE_NAME, lambda file: file.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"run_dir {self.run_dir} cannot be written to: {error.strerror}") from error


def read(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a YAML file, if there is one, and apply overrides such as `"model.n_layers=4"` in order.

    Raises:
        ValueError: the file is no YAML mapping, or an override has no `=` or goes through a plain value.
    """
    values: dict[str, Any] = {} if path is None else _parse(_text(path), str(path)) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold the sections {', '.join(SECTIONS)}, not {values!r}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} must look like key=value, as in model.n_layers=4")
        *sections, last = key.split(".")
        target = values
        for section in sections:
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                raise ValueError(f"override {override!r} sets a part of {section}, which is {target!r}")
        target[last] = _parse(value, f"override {override!r}")
    return values


def resolve(values: Mapping[str, Any]) -> Run:
    """Load the data set and make the configurations.

    The model's `max_length`, and what else `JOBS` names for the task, are those of the data set unless given;
    so is the number of hops of a model that learns from the `supporting` sentences told by the data set.

    Raises:
        ValueError: a key is unknown or missing, or a value is impossible.
    """
    _check_keys("", values, SECTIONS)
    sections = {name: values.get(name) or {} for name in ("data", "model", "train")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name} must be a section of keys and values, not {section!r}")
    _check_keys("train.", sections["train"], [field.name for field in fields(TrainConfig)])
    run_dir = values.get("run_dir")
    if run_dir in (None, ""):
        raise ValueError("run_dir is missing: name the folder of the run, as in run_dir=runs/first")
    if not isinstance(run_dir, str):
        raise ValueError(
            f"run_dir is {run_dir!r}, but must be the name of a folder; a name like 3.5 needs quotes"
        )
    options = dict(sections["data"])
    name = options.pop("name", None)
    if name is None:
        raise ValueError(f"data.name is missing: choose one of {', '.join(data.names())}")

    train = TrainConfig(**sections["train"])
    dataset = data.load(name, **options)
    job = JOBS[dataset.task]
    kinds = [kind for kind in job.kinds if kind in KINDS]
    if not kinds:
        raise ValueError(f"data.name is {name!r}, whose task {dataset.task!r} no kind of model can do")
    fields_given = dict(sections["model"])
    model_name = fields_given.pop("name", kinds[0])
    if model_name not in kinds:
        raise ValueError(
            f"model.name is {model_name!r}, but for the data set {name} one of {', '.join(kinds)}"
        )
    kind = KINDS[model_name]
    has = [field.name for field in fields(kind.config_type)]
    _check_keys("model.", fields_given, ["name", *has])
    from_data = {key: getattr(dataset, key) for key in job.from_data if key in has and hasattr(dataset, key)}
    length = getattr(dataset, "length", None)
    if "max_length" in has and length is not None:
        fields_given.setdefault("max_length", length)
    supporting = getattr(dataset, "supporting", 0)
    if supporting and hasattr(kind.config_type, "supporting"):
        fields_given.setdefault("n_hops", supporting)
    model: Any = kind.config_type(**(from_data | fields_given))
    if supporting != (wanted := getattr(model, "supporting", 0)):
        hops = f" with model.n_hops={wanted}" if wanted else ""
        raise ValueError(
            f"data.supporting is {supporting}, but {model_name}{hops} wants data.supporting={wanted}"
        )
    n_positions = getattr(model, "n_positions", None)
    if n_positions is not None and length is not None and n_positions < length:
        field_name = "max_length" if model.positions == "learned" else "axial_shape"
        raise ValueError(
            f"model.{field_name} is {getattr(model, field_name)}, "
            f"but the data set {name} needs {length} positions"
        )
    for key, needed in from_data.items():
        if needed is not None and (getattr(model, key) or 0) < needed:
            raise ValueError(f"model.{key} is {getattr(model, key)}, but the data set {name} needs {needed}")
    described = {"name": name} | {field.name: getattr(dataset, field.name) for field in fields(dataset)}  # type: ignore[arg-type]
    return Run(Path(str(values["run_dir"])), dataset, described, kind, model, train)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-3` is one, where YAML 1.1 asks for `1.0e-3` and reads anything else as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _check_keys(prefix: str, given: Iterable[str], valid: Sequence[str]) -> None:
    for key in given:
        if key not in valid:
            near = get_close_matches(str(key), valid, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ValueError(f"unknown key {prefix}{key}: {hint}The keys are {', '.join(valid)}")


def _plain(value: Any) -> Any:
    """Turn tuples into lists and paths into text, which is what YAML can say."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
