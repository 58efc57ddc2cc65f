"""Configurations are strict about keys, generous about numbers, and completed from the data set."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import pytest
import torch

from unrolled import data
from unrolled.cli import run_config
from unrolled.fields import FromData
from unrolled.folders import RUN_FILE
from unrolled.models import KINDS, Decoder, PerceiverAR
from unrolled.models.config import ModelConfig
from unrolled.training import train

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return ["data.name=text", f"data.path={text}", "data.length=16", f"run_dir={tmp_path / 'run'}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {lr: 1e-3}\nmodel: {}\ntrain: {steps: 7}\n",
            "the key train is there twice, in lines 1 and 3",
        ),
        ("contenders:\n  a: {x: 1}\n  a: {x: 2}\n", "the key a is there twice, in lines 2 and 3"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        run_config.read(tmp_path / "run.yaml", [])


def test_a_number_may_begin_with_zeros() -> None:
    overrides = ["train.seed=010", "train.steps=-007", "train.threads=0x10", "train.log_every=1_000"]
    assert run_config.read(None, overrides)["train"] == {
        "seed": 10, "steps": -7, "threads": 16, "log_every": 1000
    }  # fmt: skip


def test_the_keys_of_merged_mappings_may_be_overridden(tmp_path: Path) -> None:
    text = "a: &a {lr: 1, steps: 2}\nb: &b {<<: *a, lr: 3}\nc: {<<: *b, steps: 4}\nd: {<<: *b}\n"
    (tmp_path / "run.yaml").write_text(text)
    found = run_config.read(tmp_path / "run.yaml", [])
    assert (found["c"], found["d"]) == ({"lr": 3, "steps": 4}, {"lr": 3, "steps": 2})


def test_an_override_changes_only_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {attention_options: {linear: &x {conv: 4}, delta_net: *x}}\n")
    found = run_config.read(tmp_path / "run.yaml", ["model.attention_options.linear.conv=2"])
    assert found == {"model": {"attention_options": {"linear": {"conv": 2}, "delta_net": {"conv": 4}}}}


def test_the_model_takes_its_vocabulary_from_the_data(settings: list[str]) -> None:
    run = run_config.resolve(run_config.read(None, settings))
    assert run.model.vocab_size == len(set(TEXT))
    assert run.model.max_length == 16
    assert not run.model.start_token
    digits = run_config.resolve(run_config.read(None, ["data.name=digits", "run_dir=x"]))
    assert (digits.model.vocab_size, digits.model.max_length, digits.model.start_token) == (17, 64, True)


def test_given_fields_override_those_of_the_data(settings: list[str]) -> None:
    pairs = ["data.level=bpe", "data.vocab_size=260", "model.max_length=99", "model.vocab_size=512"]
    run = run_config.resolve(run_config.read(None, [*settings, *pairs]))
    assert (run.model.max_length, run.model.vocab_size) == (99, 512)


def test_overrides_win_over_the_file_in_order_and_are_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {n_layers: 3, d_model: 64}\ntrain: {lr: 1e-2}\n")
    overrides = [
        "model.n_layers=2",
        "model.attention=[linear, softmax]",
        "train.clip_norm=null",
        "train.lr=3e-4",
        "train.lr=5E-4",
        "model.attention_options.linear.feature_map=elu",
        "run_dir=a=b",
    ]
    assert run_config.read(file, overrides) == {
        "model": {
            "n_layers": 2,
            "d_model": 64,
            "attention": ["linear", "softmax"],
            "attention_options": {"linear": {"feature_map": "elu"}},
        },
        "train": {"lr": 5e-4, "clip_norm": None},
        "run_dir": "a=b",
    }


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "+1e-3", ".1e-2", "1.e-3", "0.001", "1.0e-3"])
def test_numbers_are_those_of_yaml_1_2(number: str) -> None:
    assert run_config.read(None, [f"train.lr={number}"]) == {"train": {"lr": 0.001}}


def test_a_saved_run_is_a_config_of_the_same_run(settings: list[str]) -> None:
    run = run_config.resolve(run_config.read(None, [*settings, "train.betas=[0.8, 0.9]", "model.n_layers=1"]))
    run.save()
    again = run_config.resolve(run_config.read_saved(run.run_dir))
    for part in ("model", "train", "data", "run_dir"):
        assert getattr(again, part) == getattr(run, part)
    assert [file.name for file in run.run_dir.iterdir()] == [RUN_FILE]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.n_layer=2", "unknown key model.n_layer: did you mean model.n_layers?"),
        ("train.step=2", "unknown key train.step: did you mean train.steps?"),
        ("modle.n_layers=2", "unknown key modle: did you mean model?"),
        ("zzz=2", "unknown key zzz: the keys are data, model, train, run_dir"),
        ("steps=2", "unknown key steps: did you mean train.steps?"),
        ("d_model=2", "unknown key d_model: did you mean model.d_model?"),
        ("length=2", "unknown key length: did you mean data.length?"),
        (
            "data.lenght=2",
            "unknown key data.lenght: did you mean data.length? The keys are name, path, level, length",
        ),
        ("data.name=null", "data.name is missing: choose one of "),
        ("data.name=nope", "'nope', but the data sets are "),
        ("run_dir=''", "run_dir is '', but must be the name of a folder"),
        ("run_dir=3.5", "run_dir is 3.5, but must be the name of a folder"),
        ("data.path=1984", "path is 1984, but must be a string, or a path; a name like 3.5 needs quotes"),
        (
            "data.val_path=yes",
            "val_path is True, but must be a string, a path, or None; a name like 3.5 needs quotes",
        ),
        ("model=3", "model is 3, but must be a section of keys and values"),
        ("train.lr=fast", "lr is 'fast', but must be a number above 0"),
        ("model.attention=5", "attention is 5, but must be a string, or a list of strings"),
        ("model.attention_options=5", "attention_options is 5, but must be a dict of dicts"),
        ("model.vocab_size=2", "model.vocab_size is 2, but must be 28 for the data set text"),
        ("model.vocab_size=64", "model.vocab_size is 64, but must be 28 for the data set text"),
        ("model.start_token=true", "model.start_token is True, but must be False for the data set text"),
        ("model.n_layers=[", "override 'model.n_layers=[' is not valid YAML"),
        ("data.path=2024-31-12", "override 'data.path=2024-31-12' is not valid YAML: month must be in 1..12"),
        ("data.name.first=1", "sets a part of name, which is 'text'"),
        ("n_layers", "override 'n_layers' must look like key=value"),
    ],
)
def test_wrong_settings_are_named(settings: list[str], override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_config.resolve(run_config.read(None, [*settings, override]))


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match=r"is \[1, 2\], but must be a mapping of the sections data, model, "):
        run_config.read(file, [])


def test_the_kind_of_model_is_chosen_by_name_and_written_down(settings: list[str]) -> None:
    chosen = [*settings, "model.name=perceiver_ar", "model.n_latents=8"]
    run = run_config.resolve(run_config.read(None, chosen))
    assert (run.kind, run.model.n_latents, run.model.max_length) == (PerceiverAR, 8, 16)
    run.save()
    again = run_config.resolve(run_config.read_saved(run.run_dir))
    assert (again.kind, again.model) == (run.kind, run.model)
    assert run_config.resolve(run_config.read(None, settings)).kind is Decoder
    with pytest.raises(ValueError, match=r"model\.name is 'perceiver', but must be one of decoder"):
        run_config.resolve(run_config.read(None, [*settings, "model.name=perceiver"]))


def test_every_task_has_a_job_and_no_kind_of_model_is_forgotten() -> None:
    assert run_config.JOBS.keys() == set(get_args(data.Task))
    assert KINDS.keys() - {"vit"} <= {kind for job in run_config.JOBS.values() for kind in job.kinds}


@dataclass
class Pairs(data.BaseDataset):
    """A data set of another task, whose model has other fields."""

    task: ClassVar[data.Task] = "translation"
    name: ClassVar[str] = "pairs"
    vocab_size: ClassVar[int] = 9
    source_vocab_size: ClassVar[None] = None

    def batch(self, *_: Any, **__: Any) -> Any: ...
    def epoch_size(self, *_: Any) -> Any: ...
    def eval_batches(self, *_: Any) -> Any: ...


@dataclass
class Narrow(ModelConfig):
    vocab_size: Annotated[int, FromData("vocab_size")]
    source: Annotated[int | None, FromData("source_vocab_size")] = 4
    hidden: int = 3


class Kind:
    model_name = "rnn_seq2seq"
    config_type = Narrow


def test_a_config_gets_only_the_fields_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda name: Pairs())
    monkeypatch.setattr(data, "dataset_type", lambda name: Pairs)
    monkeypatch.setattr(run_config, "KINDS", {"rnn_seq2seq": Kind})
    run = run_config.resolve({"data": {"name": "pairs"}, "run_dir": "x"})
    assert (run.kind, run.model) == (Kind, Narrow(9))
    with pytest.raises(ValueError, match=r"model\.vocab_size is 5, but must be 9 for the data set"):
        run_config.resolve({"data": {"name": "pairs"}, "model": {"vocab_size": 5}, "run_dir": "x"})
    monkeypatch.setattr(run_config, "KINDS", {})
    with pytest.raises(ValueError, match="but no kind of model can do its task 'translation'"):
        run_config.resolve({"data": {"name": "pairs"}, "run_dir": "x"})


@pytest.mark.parametrize("name", data.names())
def test_every_data_set_has_the_attributes_that_its_models_need(name: str) -> None:
    kind = data.dataset_type(name)
    says = {*dir(kind), *(field.name for field in fields(kind))}
    for model in run_config.JOBS[kind.task].kinds:
        assert set(KINDS[model].config_type.from_data().values()) <= says, model


def test_none_is_null_and_other_words_that_begin_with_it_are_not():
    overrides = ["train.seconds=None", "data.path=None.txt", "train.lr=1e-3"]
    assert run_config.read(None, overrides) == {
        "train": {"seconds": None, "lr": 0.001},
        "data": {"path": "None.txt"},
    }


def test_a_key_that_yaml_reads_as_a_boolean_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {name: digits, on: 1}")  # `on` is a boolean in YAML 1.1
    with pytest.raises(ValueError, match=r"data\.True"):
        run_config.resolve(run_config.read(tmp_path / "run.yaml", []))


def test_any_folder_of_data_is_read_as_it_is_named(settings: list[str]) -> None:
    folder = Path("my\u00a0\"data's\\files \U0001f600 #2")
    assert run_config.read(None, settings, folder)["data"]["data_dir"] == str(folder)


def test_a_number_sign_begins_no_comment_in_an_override() -> None:
    overrides = ["run_dir=run #7", "data.path=#5", "data.name='a #b'", "model.attention=[linear, softmax]"]
    assert run_config.read(None, overrides) == {
        "run_dir": "run #7",
        "data": {"path": "#5", "name": "a #b"},
        "model": {"attention": ["linear", "softmax"]},
    }


def test_the_folder_of_a_run_may_be_below_home(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    run = run_config.resolve(run_config.read(None, [*settings, "run_dir=~/runs"]))
    assert run.run_dir == Path("/home/me/runs")


@pytest.mark.parametrize("name", ["1e-3", "None", "12e5", "yes", "run #7"])
def test_a_saved_run_is_read_again_whatever_its_name(
    name: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_config.resolve(run_config.read(None, [*settings, f"run_dir='{name}'"]))
    run.save()
    assert run_config.read_saved(Path(name))["run_dir"] == name


def test_a_model_needs_memory_for_its_weights_and_their_gradients(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config.resolve(run_config.read(None, settings))
    weights = sum(x.nbytes for x in run.new_model(torch.device("cpu")).parameters())
    monkeypatch.setattr(run_config, "machine_bytes", lambda: 2 * weights)
    run.new_model(torch.device("cpu"))
    monkeypatch.setattr(run_config, "machine_bytes", lambda: 2 * weights - 1)
    with pytest.raises(ValueError, match="with their gradients, but this machine has"):
        run.new_model(torch.device("cpu"))


def test_the_option_for_the_data_folder_overrides_all_settings() -> None:
    settings = ["data.name=digits", "data.data_dir=there"]
    assert run_config.read(None, settings, Path("here"))["data"] == {"name": "digits", "data_dir": "here"}


def test_each_position_of_a_window_needs_a_vector(settings: list[str]) -> None:
    settings = [*settings, "model.recipe=classic"]
    run_config.resolve(run_config.read(None, [*settings, "model.max_length=16"]))
    with pytest.raises(ValueError, match="has 15 positions, but must have at least 16 for the data set text"):
        run_config.resolve(run_config.read(None, [*settings, "model.max_length=15"]))


def test_a_run_is_not_opened_again_with_another_text(settings: list[str], tmp_path: Path) -> None:
    run = run_config.resolve(run_config.read(None, settings))
    run.save()
    run.new_model(torch.device("cpu")).save(run.run_dir)
    saved = run_config.read_saved(run.run_dir)
    assert run_config.reopen(run.run_dir, saved).dataset.characters == run.dataset.characters
    (tmp_path / "text.txt").write_text(TEXT.replace("q", "Q"))
    with pytest.raises(ValueError, match=r"the data of .*run have other ids than its vocabulary.json"):
        run_config.reopen(run.run_dir, saved)


def test_a_run_is_not_opened_again_with_a_text_that_has_changed(settings: list[str], tmp_path: Path) -> None:
    run = run_config.resolve(run_config.read(None, [*settings, "train.steps=1", "train.eval_batches=1"]))
    run.save()
    train(run.new_model(torch.device("cpu")), run.dataset, run.train, run.run_dir)
    saved = run_config.read_saved(run.run_dir)
    for length in (8, 16):
        run_config.reopen(run.run_dir, {**saved, "data": saved["data"] | {"length": length}})
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    with pytest.raises(ValueError, match=r"the data of .*run have changed since it was trained"):
        run_config.reopen(run.run_dir, saved)
    (run.run_dir / "last.safetensors").unlink()
    run_config.reopen(run.run_dir, saved)


def test_no_recipe_completes_a_run_that_is_read_again(settings: list[str]) -> None:
    given = ["model.recipe=classic", "model.attention=window"]
    run = run_config.resolve(run_config.read(None, [*settings, *given]))
    assert run_config.resolve(run.settings()).model == run.model
