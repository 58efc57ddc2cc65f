"""The settings of a run: a YAML file and `key=value` overrides, checked and completed from the data set.

    data:  {name: digits}                      a data set and its options
    model: {n_layers: 4, attention: linear}    fields of its config; the `name` of its kind, by default the
                                               first in `JOBS` for the task of the data set; a `recipe`, by
                                               default that of the data set
    train: {steps: 2000}                       fields of `TrainConfig`
    run_dir: runs/digits                       the folder of the run, by default named after the data

A resolved run writes all settings, defaults included, to `run_dir/run.yaml`, which is itself such a file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml

from unrolled import data
from unrolled.bench.units import size
from unrolled.cli import recipes
from unrolled.cli._device import choose
from unrolled.fields import field_types
from unrolled.files import write_file
from unrolled.folders import CONFIG_FILE, PLAN_FILE, RUN_FILE, WEIGHTS_FILE
from unrolled.models import KINDS
from unrolled.models.config import ModelConfig
from unrolled.models.saving import SavedModel
from unrolled.training import TrainConfig, checkpoint
from unrolled.training.memory import machine_bytes

if TYPE_CHECKING:
    import torch

SECTIONS = ("data", "model", "train", "run_dir")
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, PLAN_FILE, data.VOCABULARY_FILE)
"""The files of a model in the folder of its run."""


@dataclass(frozen=True)
class Job:
    """The models and the loss of a task.

    Attributes:
        kinds: names of the models that can do it, the default first.
        unit: unit of the loss in reports; see `unit`.
    """

    kinds: tuple[str, ...]
    unit: str


JOBS: dict[data.Task, Job] = {
    "tokens": Job(("decoder", "perceiver_ar", "recurrent_lm"), "nats/token"),
    "labels": Job(("encoder", "perceiver", "perceiver_io"), "nats/label"),
    "translation": Job(
        ("encoder_decoder", "rnn_seq2seq", "luong_seq2seq", "lstmn_seq2seq", "deep_lstmn_seq2seq"),
        "nats/token",
    ),
    "answers": Job(("memory_network", "memnn"), "nats/answer"),
    "bits": Job(("ntm", "segmenter"), "nats/bit"),
    "numbers": Job(("ntm_numbers",), "mean squared error"),
    "transcription": Job(("transcriber", "bilstm_transcriber"), "nats/symbol"),
}


def unit(task: data.Task, kind: type[SavedModel]) -> str:
    """Return the unit of a model's loss in reports: its own `loss_unit`, or the unit of its task."""
    return kind.loss_unit or JOBS[task].unit


@dataclass
class Run:
    """A run whose settings are complete and checked."""

    run_dir: Path
    dataset: data.BaseDataset
    kind: type[SavedModel]
    model: ModelConfig
    train: TrainConfig

    @property
    def data(self) -> dict[str, Any]:
        """The name of the data set and its options."""
        return {"name": self.dataset.name} | self.dataset.options

    def settings(self) -> dict[str, Any]:
        """Return all settings, as the file of a run has them."""
        # With every setting written out, no recipe may complete them.
        model = {"name": self.kind.model_name, "recipe": "classic"} | asdict(cast(Any, self.model))
        sections = {"data": self.data, "model": model, "train": asdict(self.train), "run_dir": self.run_dir}
        found: dict[str, Any] = plain(sections)
        return found

    def new_model(self, device: "torch.device") -> Any:
        """Make the model with its initial weights, which follow from the seed.

        Raises:
            ValueError: its weights and gradients do not fit into memory.
        """
        import torch

        self._check_memory()
        torch.manual_seed(self.train.seed)
        model: Any = self.kind(self.model).to(device)
        self.dataset.vocabulary.attach(model)
        return model

    def _check_memory(self) -> None:
        """Raise ValueError if the model is too large to train here; Linux would kill the process."""
        import torch

        with torch.device("meta"):  # meta tensors have shapes only
            parameters = list(self.kind(self.model).parameters())
        needed = 2 * sum(x.nbytes for x in parameters)
        if (memory := machine_bytes()) is not None and needed > memory:
            count = sum(x.numel() for x in parameters)
            raise ValueError(
                f"the model has {count:,} parameters, which take {size(needed)} with their gradients, but "
                f"this machine has {size(memory)} of memory: make the model smaller"
            )

    def save(self) -> None:
        """Write `run_dir/run.yaml`, making the folder.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        text = yaml.dump(self.settings(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        try:
            write_file(self.run_dir / RUN_FILE, text)
        except OSError as error:
            raise ValueError(f"run_dir {self.run_dir} cannot be written to: {error.strerror}") from error


def read(
    path: Path | None,
    overrides: Sequence[str],
    data_dir: Path | None = None,
    *,
    example: str = "model.n_layers=4",
) -> dict[str, Any]:
    """Read a YAML file, if there is one, and apply overrides such as `"model.n_layers=4"` in order.

    The value of an override is YAML, in which `#` begins no comment. `data_dir` overrides `data.data_dir`,
    after all others. The message for an override without `=` shows `example`.

    Raises:
        ValueError: the file is not a YAML mapping, or an override has no `=` or sets a part of a value that
            is not a section, or the overrides set both `train.steps` and `train.seconds`.
    """
    parsed = None if path is None else _parse(read_text(path), str(path))
    values: dict[str, Any] = {} if parsed is None else parsed
    if not isinstance(values, dict):
        raise ValueError(f"{path} is {values!r}, but must be a mapping of the sections {', '.join(SECTIONS)}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} must look like key=value, as in {example}")
        *sections, last = key.split(".")
        target = values
        for section in sections:
            found = {} if target.get(section) is None else target[section]
            if not isinstance(found, dict):
                raise ValueError(f"override {override!r} sets a part of {section}, which is {found!r}")
            target[section] = dict(found)  # a copy: an alias of YAML may stand for the same dict elsewhere
            target = target[section]
        target[last] = _value(value, f"override {override!r}")
    both = {"train.steps", "train.seconds"} <= {override.partition("=")[0] for override in overrides}
    train = values.get("train")
    if both and isinstance(train, dict) and train.get("seconds") is not None:
        raise ValueError("train.steps and train.seconds were both given, but only one ends a run")
    if data_dir is not None:
        options = values.get("data") or {}
        if isinstance(options, dict):  # otherwise `check` says what is wrong
            values["data"] = options | {"data_dir": str(data_dir)}
    return values


def read_saved(run_dir: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Read the settings that a run has written to its folder; see `read`.

    Raises:
        ValueError: `run_dir` is not the folder of a run.
    """
    file = run_dir / RUN_FILE
    if not file.exists():
        raise ValueError(f"{run_dir} is not a run folder of unrolled train: it has no {RUN_FILE}")
    return read(file, [], data_dir)


def reopen(run_dir: Path, settings: Mapping[str, Any]) -> Run:
    """Resolve the saved settings of a run, and check that its data are still those that it was trained on.

    Raises:
        ValueError: the data have changed, or have other token ids, or as `resolve`.
    """
    run = resolve(settings)
    if run.dataset.task == "tokens" and (run_dir / data.VOCABULARY_FILE).exists():
        trained_on = data.Vocabulary.load(run_dir)
        if trained_on.is_text and not trained_on.same_ids(run.dataset.vocabulary):
            raise ValueError(
                f"the data of {run_dir} have other ids than its {data.VOCABULARY_FILE}: "
                "they are of another text or tokenizer"
            )
    trained = checkpoint.ids_checksum(run_dir)
    if trained is not None and trained != run.dataset.ids_checksum:
        raise ValueError(f"the data of {run_dir} have changed since it was trained")
    return run


class Settings(NamedTuple):
    """The settings of a run, with those of its recipe, before its data are opened."""

    kind: type[SavedModel]
    data: dict[str, Any]
    model: dict[str, Any]
    train: TrainConfig


def resolve(values: Mapping[str, Any], device: "torch.device | None" = None) -> Run:
    """Load the data set and make the configs. Fields of the model that follow from the data may be left out.

    A recipe trains in bf16 where the device, by default that of `choose`, is made for it.

    Raises:
        ValueError: a key is unknown or missing, or a value is out of range.
    """
    kind, options, fields_given, train = check(values, device)
    dataset = data.load(**options)
    model = _model(kind, dataset, fields_given)
    return Run(_run_dir(values.get("run_dir"), dataset), dataset, kind, model, train)


def check(values: Mapping[str, Any], device: "torch.device | None" = None) -> Settings:
    """Check all settings that can be checked without opening the data.

    Raises:
        ValueError: a key is unknown or missing, or a value of `train` is out of range.
    """
    _check_keys("", values, SECTIONS)
    sections = {key: {} if values.get(key) is None else values[key] for key in ("data", "model", "train")}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{key} is {section!r}, but must be a section of keys and values")
    if (name := sections["data"].get("name")) is None:
        raise ValueError(f"data.name is missing: choose one of {', '.join(data.names())}")
    dataset_type = data.dataset_type(name)
    kind = _kind(name, dataset_type.task, sections["model"].get("name"))
    valid = recipes.names_for(kind.model_name)
    recipe = sections["model"].get("recipe", dataset_type.recipe if len(valid) > 1 else "classic")
    if recipe not in valid:
        wanted = f"one of {', '.join(valid)}" if len(valid) > 1 else "'classic'"
        raise ValueError(f"model.recipe is {recipe!r}, but must be {wanted} for the model {kind.model_name}")
    data_options = data.options_of(name)
    _check_keys("data.", sections["data"], ["name", *data_options])
    sections = recipes.apply(recipe, sections, data_options, choose(None) if device is None else device)
    _check_keys("train.", sections["train"], list(field_types(TrainConfig)))
    fields_given = {key: value for key, value in sections["model"].items() if key != "name"}
    _check_keys("model.", fields_given, ["name", "recipe", *field_types(kind.config_type)])
    return Settings(kind, sections["data"], fields_given, TrainConfig(**sections["train"]))


def _kind(name: str, task: data.Task, model_name: object) -> type[SavedModel]:
    """Return the kind of model of that name, by default the first that can do the task of the data set."""
    kinds = [kind for kind in JOBS[task].kinds if kind in KINDS]
    if not kinds:
        raise ValueError(f"data.name is {name!r}, but no kind of model can do its task {task!r}")
    if model_name is None:
        return KINDS[kinds[0]]
    if model_name not in kinds:
        raise ValueError(
            f"model.name is {model_name!r}, but must be one of {', '.join(kinds)} for the data set {name}"
        )
    return KINDS[str(model_name)]


def _run_dir(given: object, dataset: data.BaseDataset) -> Path:
    """Return the folder of the run: by default, one that has the name of the data."""
    if given is None:
        return Path("runs", dataset.vocabulary.data or dataset.name)
    if not isinstance(given, str) or not given:
        raise ValueError(
            f"run_dir is {given!r}, but must be the name of a folder; a name like 3.5 needs quotes"
        )
    return Path(given).expanduser()


def _model(kind: type[SavedModel], dataset: data.BaseDataset, given: Mapping[str, Any]) -> ModelConfig:
    """Make the config of a model from its fields, completed from the data."""
    fields_given = dict(given)
    if fields_given.get("positions") == "axial":
        fields_given.setdefault("axial_shape", dataset.vocabulary.shape)
    facts = _facts(kind, dataset)
    # Where the data set has None, False or 0, the model keeps its default.
    follows = {key: fact for key, fact in facts.items() if fact}
    model: ModelConfig = kind.config_type(**(follows | fields_given))
    check_fit(model, dataset, kind)
    return model


def _facts(kind: type[SavedModel], dataset: data.BaseDataset) -> dict[str, Any]:
    """Return the fields of a model's config that follow from the data, as the data set has them."""
    return {key: getattr(dataset, attribute) for key, attribute in kind.config_type.from_data().items()}


def check_fit(model: ModelConfig, dataset: data.BaseDataset, kind: type[SavedModel]) -> None:
    """Raise ValueError if a model is too small for the data set, or needs a data set with other options.

    A model of byte pairs may have more ids than the data; with other data, each id has a meaning.
    """
    model_name, facts = kind.model_name, _facts(kind, dataset)
    for attribute, expected in model.needs.items():
        if (found := getattr(dataset, attribute)) != expected:
            raise ValueError(f"data.{attribute} is {found}, but must be {expected} for this {model_name}")
    length = facts.get("max_length")
    if length and model.n_positions is not None and model.n_positions < length:
        raise ValueError(
            f"the model has {model.n_positions} positions, but must have at least {length} for the data set "
            f"{dataset.name}: raise model.max_length or model.axial_shape"
        )
    exact = ["start_token"] if dataset.vocabulary.may_have_more_ids else ["start_token", "vocab_size"]
    for key, fact in facts.items():
        given, must_be = vars(model)[key], f"{fact}"
        fits = given == fact
        if key not in exact:
            fits = not fact or key == "max_length" or (given is not None and given >= fact)
            must_be = f"at least {fact}"
        if not fits:
            raise ValueError(f"model.{key} is {given}, but must be {must_be} for the data set {dataset.name}")


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ValueError: the file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error


def _value(text: str, source: str) -> Any:
    """Parse the value of an override."""
    value = _parse(text, source)
    plain_text = value is None or isinstance(value, str)
    if "#" in text and plain_text and not text.lstrip().startswith(("'", '"')):
        return text.strip()  # YAML would read ` #` as the beginning of a comment
    return value


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that does not exist
        raise ValueError(f"{source} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, as YAML 1.2 does; YAML 1.1 reads it as text, and requires `1.0e-3`.

    `None` is null, as in Python and in the messages of this library. A key that is twice in a mapping is an
    error, as in YAML 1.2; PyYAML would silently drop the first.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping and check its keys. Those of `<<`, which they may override, are added later."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"the key {key.value} is there twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read `010` as ten, as YAML 1.2 does; in YAML 1.1, it is eight."""
        text = self.construct_scalar(node)
        return int(text) if re.fullmatch(r"[-+]?\d+", str(text)) else super().construct_yaml_int(node)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as a number or as null."""


_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"None$"), ["N"])


def _check_keys(prefix: str, given: Iterable[str], valid: Sequence[str]) -> None:
    for key in given:
        if key not in valid:
            near = [] if prefix else _with_section(str(key))
            near += [prefix + name for name in get_close_matches(str(key), valid, n=1)]
            hint = f"did you mean {near[0]}? The" if near else "the"
            raise ValueError(f"unknown key {prefix}{key}: {hint} keys are {', '.join(valid)}")


def _with_section(key: str) -> list[str]:
    """Return the settings of this name with their sections, such as `train.steps`."""
    of_data = {option for name in data.names() for option in data.options_of(name)}
    of_models = {"recipe"}.union(*(field_types(kind.config_type) for kind in KINDS.values()))
    sections = {"train": field_types(TrainConfig), "data": of_data, "model": of_models}
    return [f"{section}.{key}" for section, names in sections.items() if key in names]


def plain(value: Any) -> Any:
    """Convert tuples to lists and paths to text, as YAML and JSON need them."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
