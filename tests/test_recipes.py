"""Recipes: settings of a run under one name, which its own settings complete or replace."""

from pathlib import Path

import pytest
import torch

from unrolled.cli import run_config
from unrolled.cli.recipes import RECIPES
from unrolled.models import DecoderConfig
from unrolled.ops import processor
from unrolled.training import TrainConfig


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return ["data.name=text", f"data.path={text}", f"run_dir={tmp_path / 'run'}"]


def resolved(*overrides: str) -> run_config.Run:
    return run_config.resolve(run_config.read(None, overrides))


def test_classic_is_the_defaults(settings: list[str]) -> None:
    run = resolved(*settings, "model.recipe=classic")
    assert run.model == DecoderConfig(run.dataset.vocab_size, max_length=64)
    assert run.train == TrainConfig()


@pytest.mark.parametrize(
    ("overrides", "recipe"),
    [
        (["data.name=text", "data.path={text}"], "rwkv-lm"),
        (["data.name=digits"], "pixels"),
        (["data.name=copy"], "classic"),
        (["data.name=digits", "model.name=recurrent_lm"], "classic"),
    ],
)
def test_the_data_set_says_the_recipe(overrides: list[str], recipe: str, settings: list[str]) -> None:
    overrides = [x.format(text=settings[1].removeprefix("data.path=")) for x in overrides]
    default, named = resolved(*overrides), resolved(*overrides, f"model.recipe={recipe}")
    assert (default.model, default.train, default.data) == (named.model, named.train, named.data)


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_for_machines_that_multiply_it(
    fast: bool, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bf16", lambda device: fast)
    assert resolved(*settings).train.bf16 == fast
    assert resolved(*settings, "train.bf16=true").train.bf16
    assert not resolved(*settings, "model.recipe=classic").train.bf16


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("classic", "speech")])
def test_a_recipe_sets_all_sections_and_trains(name: str, settings: list[str]) -> None:
    given = ["data.name=digits"] if name == "pixels" else settings
    run = resolved(*given, f"model.recipe={name}", "model.n_layers=3", "model.d_model=32")
    recipe = RECIPES[name]
    pattern = recipe["model"]["attention"]
    assert run.model.attention == (pattern * 3)[:3]
    assert run.model.d_model == 32
    assert run.model.n_heads == recipe["model"]["n_heads"]
    assert run.train.optimizer == recipe["train"]["optimizer"]
    assert recipe.get("data", {}).items() <= run.data.items()
    model = run.kind(run.model)
    batch = run.dataset.batch("train", step=0, batch_size=1, seed=0)
    model.loss(batch.inputs, batch.targets).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_pixels_have_the_positions_of_their_image() -> None:
    assert resolved("data.name=digits").model.axial_shape == [8, 8]
    with pytest.raises(ValueError, match="axial_shape is None, but must be a list of sizes"):
        resolved("data.name=copy", "model.recipe=pixels")


def test_the_folder_has_the_name_of_the_data(settings: list[str]) -> None:
    assert resolved("data.name=digits").run_dir == Path("runs/digits")
    assert resolved(*settings[:2]).run_dir == Path("runs/text")
    assert resolved("data.name=copy", "run_dir=null").run_dir == Path("runs/copy")


def test_options_of_mechanisms_without_a_layer_go(settings: list[str]) -> None:
    run = resolved(*settings, "model.recipe=small-lm", "model.n_layers=1")
    assert run.model.attention_options == {"mamba2": {"rotary": False}}


def test_own_settings_win(settings: list[str]) -> None:
    own = ["data.length=16", "train.lr=0.5", "model.attention_options.window.window=7"]
    run = resolved(*settings, "model.recipe=small-lm", *own)
    assert (run.dataset.length, run.train.lr) == (16, 0.5)
    assert run.model.attention_options == {"mamba2": {"rotary": False}, "window": {"window": 7}}


def test_own_settings_of_single_layers_win(settings: list[str]) -> None:
    run = resolved(*settings, "model.recipe=small-lm", "model.layer_options={window: {window: [1, 2, 3, 4]}}")
    assert run.model.attention_options == {"mamba2": {"rotary": False}, "window": {}}
    assert run.model.layer_options == {"window": {"window": [1, 2, 3, 4]}}


def test_options_of_replaced_mechanisms_go(settings: list[str]) -> None:
    run = resolved(*settings, "model.recipe=small-lm", "model.attention=softmax")
    assert run.model.attention == "softmax"
    assert run.model.attention_options == {}


def test_mechanisms_that_cannot_rotate_need_no_option(settings: list[str]) -> None:
    run = resolved(*settings, "model.attention=mamba")
    assert run.model.attention_options == {"mamba": {"rotary": False}}
    mixed = resolved(*settings, "model.attention=[mamba2, window, mamba2, window]")
    assert mixed.model.attention_options == {"mamba2": {"rotary": False}}
    own = resolved(*settings, "model.attention=mamba", "model.positions=rotary")
    assert own.model.attention_options == {}  # building this model is an error


def test_a_saved_run_is_complete_without_the_recipe(settings: list[str]) -> None:
    run = resolved(*settings, "model.recipe=best-lm", "model.attention=linear")
    run.save()
    again = run_config.resolve(run_config.read_saved(run.run_dir))
    assert (again.model, again.train, again.data) == (run.model, run.train, run.data)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.recipe=best"],
            "model.recipe is 'best', but must be one of classic, rwkv-lm, small-lm, best-lm, pixels",
        ),
        (["model.recipe=[a]"], r"model.recipe is \['a'\], but must be one of"),
        (["model.recipe=best-lm", "model.name=recurrent_lm"], "must be 'classic' for the model recurrent_lm"),
        (["model.recipe=best-lm", "model.n_layers=x"], "n_layers is 'x'"),
        (["model.layer_options={window: 5}"], "layer_options is {'window': 5}"),
        (["model.recipe=best-lm", "model.attention=[{}]"], "attention is"),
    ],
)
def test_wrong_recipes_are_named(overrides: list[str], message: str, settings: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(*settings, *overrides)


def test_options_of_a_mechanism_that_no_layer_has_are_not_dropped_in_silence(settings: list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"attention_options is for \['performer'\], but must be for some of"
    ):
        resolved(*settings, "model.attention_options.performer.n_features=8")
