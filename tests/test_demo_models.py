"""The trained models that come with the library: small, whole, and of use the moment it is installed."""

import json

import pytest
import yaml
from commands import error, works

from unrolled import demo_models
from unrolled.data import Vocabulary
from unrolled.decode import load_model, packed_form, plan
from unrolled.folders import PLAN_FILE
from unrolled.generation import generate
from unrolled.ops import native

FOLDER = demo_models.path("text").parent
MOST_BYTES = 2_000_000
SAID = ["--prompt", "ROMEO:", "--tokens", 30, "--seed", 0]


def test_they_are_small_together():
    files = [x for x in FOLDER.rglob("*") if x.is_file() and "__pycache__" not in x.parts]
    assert sum(x.stat().st_size for x in files) <= MOST_BYTES


@pytest.mark.parametrize("name", demo_models.NAMES)
def test_each_is_whole_and_says_how_it_was_trained(name):
    folder = demo_models.path(name)
    model = load_model(folder)
    Vocabulary.load(folder).check(model.config.vocab_size)
    assert packed_form(folder) == "int8"
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert {key: settings["model"][key] for key in config if key != "model"} == {
        key: x for key, x in config.items() if key != "model"
    }
    said = (FOLDER / "README.md").read_text()
    assert f"run_dir={settings['run_dir']}" in said
    assert f"{sum(x.numel() for x in model.parameters()):,} weights" in said
    assert f"{(folder / PLAN_FILE).stat().st_size:,} bytes" in said


@pytest.mark.skipif(not native.available(), reason="plans need the C++ kernels")
@pytest.mark.parametrize("name", demo_models.NAMES)
def test_packing_it_again_gives_the_same_bytes(name, tmp_path):
    plan(load_model(demo_models.path(name)), "int8").save(tmp_path)
    assert (tmp_path / PLAN_FILE).read_bytes() == (demo_models.path(name) / PLAN_FILE).read_bytes()


def test_text_is_generated_at_once():
    printed = works("generate", "--demo", *SAID).stdout
    assert printed.startswith("ROMEO:")
    assert len(printed) == len("ROMEO:") + 30 + len("\n")
    assert works("generate", demo_models.path("text"), *SAID).stdout == printed


def test_without_kernels_the_weights_are_unpacked(monkeypatch):
    monkeypatch.setattr(native, "missing", lambda: "there is no compiler")
    printed = works("generate", "--demo", *SAID).stdout
    vocabulary = Vocabulary.load(demo_models.path("text"))
    [drawn] = generate(load_model(demo_models.path("text")), [vocabulary.encode("ROMEO:")], 30, seed=0)
    assert printed == f"ROMEO:{vocabulary.decode(drawn)}\n"


def test_with_an_output_it_draws_digits(tmp_path):
    pytest.importorskip("matplotlib")
    works("generate", "--demo", "--num-samples", 1, "--out", tmp_path / "digit.png", "--seed", 0)
    assert (tmp_path / "digit.png").read_bytes().startswith(b"\x89PNG")
    printed = error("generate", "--demo", "--out", tmp_path / "digit.png", "--prompt", "3")
    assert printed.startswith("--prompt is for text, but ")


def test_a_model_is_named_once(tmp_path):
    assert error("generate", tmp_path, "--demo") == f"RUN_DIR is {tmp_path}, but must be left out with --demo"
    printed = error("generate", "--prompt", "ROMEO:")
    assert printed == "RUN_DIR is missing: name the folder of a model, or use the library's own with --demo"
    with pytest.raises(ValueError, match="name is 'speech', but must be one of digits, text"):
        demo_models.path("speech")
