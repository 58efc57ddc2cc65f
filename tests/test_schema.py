"""The JSON Schema that `unrolled schema` writes takes the files that `unrolled train` takes."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from commands import error, works

from unrolled import data
from unrolled.cli import run_config
from unrolled.folders import RUN_FILE
from unrolled.models import KINDS

ROOT = Path(__file__).parent.parent
RUN = {"data": {"name": "copy"}, "run_dir": "x"}
FENCED = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(works("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.checkout
def test_the_files_of_the_benchmarks_and_documents_are_valid(
    validator: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    files = sorted((ROOT / "benchmarks").glob("*.yaml"))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for number, text in enumerate(FENCED.findall(page.read_text(encoding="utf-8"))):
            if "run_dir" in yaml.safe_load(text):
                files.append(tmp_path / f"{page.stem}{number}.yaml")
                files[-1].write_text(text)
    assert len(files) > 8
    for file in files:
        validator.validate(run_config.read(file, []))


@pytest.mark.parametrize("name", [*data.names()])
def test_every_data_set_with_each_of_its_models_is_valid(
    name: str, validator: jsonschema.Draft202012Validator
) -> None:
    kinds = run_config.JOBS[data.dataset_type(name).task].kinds
    for model in ({}, None, *({"name": kind} for kind in kinds)):
        validator.validate({"data": {"name": name}, "model": model, "train": None, "run_dir": "x"})
    for kind in KINDS.keys() - set(kinds):
        assert not validator.is_valid({"data": {"name": name}, "model": {"name": kind}, "run_dir": "x"})


@pytest.mark.parametrize(
    "settings",
    [
        ["data.name=copy", "train.betas=[0.8, 0.9]", "model.attention=[linear, softmax]", "model.n_layers=2"],
        ["data.name=copy", "model.norm=[pre, res_post]", "model.bias=false", "model.n_layers=2"],
        ["data.name=copy_bits", "model.hidden_size=8", "model.cell_options={memory_size: 8}"],
        ["data.name=copy", "model.name=recurrent_lm", "model.cell=gru", "train.clip_norm=null"],
    ],
)
def test_a_run_that_train_wrote_is_valid(
    settings: list[str], validator: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    run = run_config.resolve(run_config.read(None, [*settings, f"run_dir={tmp_path}"]))
    run.save()
    validator.validate(run_config.read(tmp_path / RUN_FILE, []))


@pytest.mark.parametrize(
    "changes",
    [
        {"modle": {}},
        {"run_dir": ""},
        {"run_dir": 3.5},
        {"data": None},
        {"data": {}},
        {"data": {"name": "nope"}},
        {"data": {"name": "copy", "lenght": 8}},
        {"data": {"name": "copy", "length": 1}},
        {"data": {"name": "copy", "length": "8"}},
        {"data": {"name": "digits", "length": 8}},
        {"data": {"name": "text", "level": "lines"}},
        {"data": {"name": "babi", "tasks": [21]}},
        {"model": 3},
        {"model": {"name": "vit"}},
        {"model": {"n_layer": 2}},
        {"model": {"n_layers": 0}},
        {"model": {"n_layers": 2**63}},
        {"model": {"n_layers": True}},
        {"model": {"dropout": 1.0}},
        {"model": {"norm": "batch"}},
        {"model": {"attention": 5}},
        {"model": {"attention_options": {"linear": 3}}},
        {"model": {"name": "recurrent_lm", "n_heads": 2}},
        {"train": {"step": 3}},
        {"train": {"steps": None}},
        {"train": {"lr": 0}},
        {"train": {"lr": "fast"}},
        {"train": {"betas": [0.9]}},
        {"train": {"threads": 1025}},
    ],
    ids=str,
)
def test_what_train_refuses_is_not_valid(
    changes: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    validator.validate(RUN)
    assert not validator.is_valid(RUN | changes)
    with pytest.raises(ValueError, match=r"but |unknown key|is not an option|missing"):
        run_config.resolve(RUN | changes)


def test_only_the_data_is_required(validator: jsonschema.Draft202012Validator) -> None:
    validator.validate({"data": RUN["data"]})
    validator.validate({"data": RUN["data"], "run_dir": None})
    assert not validator.is_valid({"run_dir": "x"})


def test_each_field_is_described_and_has_its_default(validator: jsonschema.Draft202012Validator) -> None:
    for name, section in validator.schema["$defs"].items():
        for field, said in section["properties"].items():
            assert field == "name" or said["description"], (name, field)
    fields = validator.schema["$defs"]["model.perceiver_ar"]["properties"]
    assert fields["n_latents"]["default"] == 256
    assert fields["d_model"] == {
        "description": "width of the residual stream.",
        "type": "integer",
        "minimum": 1,
        "maximum": 2**63 - 1,
        "default": 256,
    }
    assert fields["vocab_size"]["description"].endswith("By default that of the data set.")


def test_it_is_written_to_a_file_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run.schema.json"
    for _ in range(2):
        assert not works("schema", "--out", out).stderr
    assert out.read_text() == works("schema").stdout
    out.write_text("my notes")
    assert "is not from this command" in error("schema", "--out", out)
    assert out.read_text() == "my notes"
    works("schema", "--out", out, "--force")
    assert "--force is for --out" in error("schema", "--force")
