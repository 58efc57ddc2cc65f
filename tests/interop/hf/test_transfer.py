"""The two stages of training a linearized model: which parameters they train, and resumed runs."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import error, works
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from unrolled.interop import hf
from unrolled.interop.hf.recipe import Recipe, _saved_dtype, run, train_linearized
from unrolled.interop.hf.text import TokenizedText
from unrolled.interop.hf.transfer import AttentionTransfer, FineTuning, LanguageModel, finetune, transfer
from unrolled.training import TrainConfig, train
from unrolled.training.evaluation import evaluate

# peft asks transformers by the older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TEXT = "a quick brown fox jumps over the lazy dog. the dog sleeps, the fox runs on. " * 12
CONFIG = TrainConfig(steps=30, batch_size=4, lr=1e-2, warmup_steps=3, weight_decay=0.0, eval_every=30)


def make_tokenizer():
    characters = {x: i for i, x in enumerate(["?", *sorted(set(TEXT + "\n"))])}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, and a model briefly trained on it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(TEXT)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids))
    data = TokenizedText([folder / "text.txt"], tokenizer, length=32)
    train(LanguageModel(model), data, CONFIG, folder / "run", progress=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def teacher(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def data(folder):
    return TokenizedText([folder / "text.txt"], make_tokenizer(), length=32)


def linear(teacher):
    return hf.linearize(copy.deepcopy(teacher), "linear", feature_map="hedgehog")


def weights(model):
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_the_tokens_are_those_of_the_text(data):
    batch = data.batch("train", step=0, batch_size=1, seed=0)
    text = "".join(data.tokenizer.convert_ids_to_tokens(batch.inputs[0].tolist()))
    assert text in TEXT
    assert torch.equal(batch.inputs[0, 1:], batch.targets[0, :-1])
    assert sum(int((x.targets >= 0).sum()) for x in data.eval_batches(4)) == -(-len(TEXT) // 10) - 1


def test_any_text_has_the_ids_of_the_tokenizer(data):
    ids = data.tokenizer("a dog")["input_ids"]
    assert data.encode("a dog").tolist() == data.vocabulary.encode("a dog") == ids
    assert data.decode(data.encode("a dog")) == data.vocabulary.decode(torch.tensor(ids)) == "a   d o g"
    data.vocabulary.check(data.vocab_size)


def test_files_are_joined_by_line_breaks_without_marks_or_special_tokens(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("a dog runs. ", encoding="utf-8-sig")  # begins with a mark
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<", "eos_token": "."})
    first = [("<", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="< $A", special_tokens=first)
    data = TokenizedText(files, tokenizer, length=4, val_fraction=0.5)
    ids = torch.from_numpy(np.concatenate([*data._ids.values()]))
    assert "".join(tokenizer.convert_ids_to_tokens(ids.tolist())) == "a dog runs. \na dog runs. "
    assert data.encode("a").tolist() == tokenizer("a")["input_ids"][1:]
    assert data.vocabulary.text_tokenizer.end == tokenizer.eos_token_id


def test_the_loss_of_transfer_equals_its_definition(teacher, data):
    ids = data.batch("train", step=0, batch_size=2, seed=0).inputs
    student = linear(teacher)
    inputs, outputs = [], []
    x = teacher.model.embed_tokens(ids)
    angles = teacher.model.rotary_emb(x, torch.arange(32)[None])
    for layer in teacher.model.layers:  # what each block does, written out
        normed = layer.input_layernorm(x)
        o = layer.self_attn(normed, angles)[0]
        inputs, outputs = [*inputs, normed], [*outputs, o]
        x = x + o
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    errors = []
    for layer, read, expected in zip(student.model.layers, inputs, outputs, strict=True):
        got = layer.self_attn(read, position_embeddings=angles)[0]
        errors.append((got - expected).pow(2).sum() / expected.pow(2).sum())
    found = AttentionTransfer(student, teacher).loss(ids, ids)
    torch.testing.assert_close(found, torch.stack(errors).mean())


def test_the_teacher_keeps_its_mode_but_its_dropout_does_not_act(data):
    sizes = {"n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.5}
    teacher = GPT2LMHeadModel(GPT2Config(vocab_size=data.vocab_size, **sizes)).train()
    teacher.lm_head.eval()
    stage = AttentionTransfer(linear(teacher), teacher).train()
    ids = data.batch("train", step=0, batch_size=2, seed=0).inputs
    assert float(stage.loss(ids, ids).detach()) == float(stage.loss(ids, ids).detach())
    assert [name for name, module in teacher.named_modules() if not module.training] == ["lm_head"]


def test_transfer_needs_new_parameters(teacher, data):
    student = hf.linearize(copy.deepcopy(teacher), "softmax")
    with pytest.raises(ValueError, match="no parameters of their own to train"):
        AttentionTransfer(student, teacher)
    hedgehog = linear(teacher)
    ids = data.batch("train", step=0, batch_size=2, seed=0).inputs
    assert AttentionTransfer(hedgehog, teacher).loss(ids, ids) > 1e-4


def test_transfer_trains_new_parameters_only(teacher, data, tmp_path):
    student = linear(teacher)
    before, of_teacher = weights(student), weights(teacher)
    start = evaluate(AttentionTransfer(linear(teacher), teacher), data, CONFIG)
    result = transfer(student, teacher, data, CONFIG, tmp_path, progress=False)
    assert changed(before, weights(student)) == set(hf.new_parameters(student))
    assert changed(of_teacher, weights(teacher)) == set()
    assert result.last_val < 0.7 * start
    assert all(x.requires_grad for x in student.parameters())
    assert set(load_file(tmp_path / "trained.safetensors")) == {
        f"model.{x}" for x in hf.new_parameters(student)
    }


@pytest.mark.parametrize("lora", [0, 2])
def test_fine_tuning_trains_all_weights_or_low_rank_updates(teacher, data, tmp_path, lora):
    model = linear(teacher)
    before = weights(model)
    start = evaluate(LanguageModel(model), data, CONFIG)
    result = finetune(model, data, CONFIG, tmp_path, lora=lora, progress=False)
    after = weights(model)
    assert before.keys() == after.keys()
    assert result.last_val < start
    assert evaluate(LanguageModel(model), data, CONFIG) == pytest.approx(result.last_val, abs=1e-5)
    touched = changed(before, after)
    if lora == 0:
        assert touched == before.keys()
        return
    projections = {x for x in before if x.endswith(("qkv_proj.weight", "out_proj.weight"))}
    assert touched == projections | set(hf.new_parameters(model))
    for name in projections:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) == lora


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(teacher, data, tmp_path):
    settings = TrainConfig(steps=6, batch_size=2, warmup_steps=0, schedule="constant", checkpoint_every=3)
    found = []
    for lora in (0, 2):
        for name, stops in (("whole", [6]), ("stopped", [3, 6])):
            for steps in stops:
                config = TrainConfig(**{**vars(settings), "steps": steps})
                recipe = Recipe(transfer=config, finetune=config, lora=lora)
                if steps == 3:  # stopped in stage 1: stage 2 never began
                    recipe = Recipe(transfer=config, finetune=None)
                model, _ = train_linearized(teacher, data, recipe, tmp_path / f"{name}{lora}")
            found.append(weights(model))
        assert changed(*found[-2:]) == set()


def test_a_stage_that_fails_leaves_the_model_as_it_was(teacher, data, tmp_path, monkeypatch):
    """Without updates that are not merged, and with the weights frozen that were."""

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("unrolled.interop.hf.transfer.train", fail)
    model = linear(teacher)
    model.lm_head.requires_grad_(False)
    before = weights(model)
    for stage, given in ((transfer, (teacher,)), (finetune, ())):
        with pytest.raises(KeyboardInterrupt):
            stage(model, *given, data, CONFIG, tmp_path, **{} if given else {"lora": 2})
        assert weights(model).keys() == before.keys()
        assert changed(before, weights(model)) == set()
        assert [name for name, x in model.named_parameters() if not x.requires_grad] == ["lm_head.weight"]


def test_the_run_of_another_model_is_not_resumed(teacher, data, tmp_path):
    config = TrainConfig(steps=1, batch_size=2, warmup_steps=0)
    finetune(linear(teacher), data, config, tmp_path, progress=False)
    other = linear(teacher)
    other.lm_head.weight.data.mul_(2)
    with pytest.raises(ValueError, match="start"):
        finetune(other, data, config, tmp_path, progress=False)


def test_losses_of_another_recipe_are_not_reused(teacher, data, tmp_path):
    found = {}
    for name in ("linear", "window", "linear"):
        recipe = Recipe(attention=name, options={}, transfer=None, finetune=None)
        _, losses = train_linearized(teacher, data, recipe, tmp_path)
        assert found.setdefault(name, losses) == losses
        assert json.loads((tmp_path / "linearize.json").read_text()) == losses
    assert found["linear"]["before"] == found["window"]["before"]
    assert found["linear"]["right after"] != found["window"]["right after"]


def test_the_command_runs_both_stages_and_can_be_repeated(folder, tmp_path):
    command = ["linearize", folder, tmp_path, "--data", folder / "text.txt", "--length", 32]
    command += ["--batch-size", 4, "--transfer-steps", 10, "--finetune-steps", 10, "--lora", 2, "--layers", 1]
    works(*command)
    losses = json.loads((tmp_path / "linearize.json").read_text())
    assert list(losses) == ["before", "right after", "transfer", "finetune"]
    assert (tmp_path / "transfer" / "log.jsonl").exists()
    written = (tmp_path / "model.safetensors").read_bytes()
    works(*command)
    assert (tmp_path / "model.safetensors").read_bytes() == written
    assert "was linearized before" in error("linearize", tmp_path, "out", *command[3:])
    model = hf.load_linearized(tmp_path)
    assert list(model.config.unrolled_attention) == ["1"]
    data = TokenizedText([folder / "text.txt"], make_tokenizer(), length=32)
    assert evaluate(LanguageModel(model), data, CONFIG) == pytest.approx(losses["finetune"], abs=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"model\.safetensors or config\.json was changed after it was"):
        hf.load_linearized(tmp_path)


def test_weights_in_16_bits_are_trained_in_32_and_saved_in_16(folder, teacher, tmp_path):
    teacher.bfloat16().save_pretrained(tmp_path / "half")
    make_tokenizer().save_pretrained(tmp_path / "half")
    small = TrainConfig(steps=2, batch_size=4, lr=1e-5, warmup_steps=1, weight_decay=0.0, eval_every=2)
    recipe = Recipe(transfer=None, finetune=small)
    run(str(tmp_path / "half"), tmp_path / "out", [folder / "text.txt"], recipe, length=32)
    trained = load_file(tmp_path / "out" / "finetune" / "trained.safetensors")
    start = teacher.model.layers[0].mlp.up_proj.weight
    found = next(x for name, x in trained.items() if name.endswith("layers.0.mlp.up_proj.weight"))
    assert found.dtype == torch.float32
    assert (found != start).float().mean() > 0.9  # in bfloat16, such small updates change no weight
    assert hf.load_linearized(tmp_path / "out").dtype == torch.bfloat16


def test_the_type_of_saved_weights_has_two_names():
    """The second is that of earlier versions of transformers."""
    for config in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}):
        assert _saved_dtype(config) == torch.bfloat16
    for config in ({}, {"dtype": None}, {"dtype": "nn"}):
        assert _saved_dtype(config) == torch.float32


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("{folder} {out} --option window", "must be NAME=VALUE"),
        ("{folder} {out} --layers a", "layers is 'a'"),
        ("{folder} {out} --attention linaer", "attention is 'linaer'"),
        ("{folder} {out} --data nowhere.txt", "nowhere.txt: No such file"),
        ("{folder} {folder}", "is the model's own folder"),
        ("{out} {out}/new", "cannot be read as a model of transformers: it has no config"),
        (
            "{folder} {out} --feature-map elu --option feature_map=elu",
            "--feature-map and --option feature_map exclude each other",
        ),
        ("{folder} {out} --lora 2 --finetune-steps 0", "lora is 2, but must be 0 without fine-tuning"),
    ],
)
def test_wrong_commands_are_refused(folder, tmp_path, words, sentence):
    before = (folder / "config.json").read_text()
    words = words.format(folder=folder, out=tmp_path).split()
    assert sentence in error("linearize", *words, "--data", folder / "text.txt", "--length", 32)
    assert (folder / "config.json").read_text() == before


def test_models_that_do_not_fit_are_refused(folder, tmp_path):
    sizes = {"vocab_size": 60, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    bert = BertConfig(**sizes, hidden_size=16, intermediate_size=16)
    few = LlamaConfig(**sizes | {"vocab_size": 30}, hidden_size=16, intermediate_size=16)
    short = BertConfig(**bert.to_diff_dict() | {"is_decoder": True, "max_position_embeddings": 16})
    made = {"gpt2": GPT2LMHeadModel(gpt2), "bert": BertForMaskedLM(bert), "few": LlamaForCausalLM(few)}
    made["short"] = BertLMHeadModel(short)
    for name, model in made.items():
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    made["gpt2"].save_pretrained(tmp_path / "bare")
    shutil.copytree(folder, tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for name, sentence in {
        "gpt2": "length is 32, but must be at most 16, the number of positions of the model",
        "bert": "reads in both directions, but must be a causal language model",
        "short": "length is 32, but must be at most 16, the number of positions of the model",
        "few": "the tokenizer makes the id 30, but the model has 30 ids",
        "bare": "the tokenizer makes no tokens of the text: the folder of the model may have none",
        "cut": "cut cannot be read as a causal language model",
    }.items():
        words = [tmp_path / name, tmp_path / "out", "--data", folder / "text.txt"]
        assert sentence in error("linearize", *words, "--length", 32)
        assert not (tmp_path / "out").exists()


def test_a_refused_command_keeps_the_losses_of_the_model(folder, tmp_path):
    command = [
        "linearize",
        folder,
        tmp_path,
        "--data",
        folder / "text.txt",
        "--length",
        32,
        "--batch-size",
        4,
    ]
    works(*command, "--transfer-steps", 1, "--finetune-steps", 1)
    before = (tmp_path / "linearize.json").read_text()
    assert "--fresh" in error(*command, "--transfer-steps", 1, "--finetune-steps", 1, "--layers", 1)
    assert (tmp_path / "linearize.json").read_text() == before


def test_arguments_of_attention_may_be_given_by_position():
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    teacher = BertLMHeadModel(BertConfig(**sizes, intermediate_size=32, is_decoder=True))
    ids = torch.arange(10).view(2, 5)
    assert AttentionTransfer(linear(teacher), teacher).loss(ids, ids).isfinite()


def test_fine_tuning_with_updates_keeps_the_embedding(teacher):
    model = FineTuning(linear(teacher), lora=2)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert not any("embed" in name or "mlp" in name or "base_layer" in name for name in trained)
    assert any("lora_A" in name for name in trained)


def test_the_command_passes_on_the_feature_map_and_the_learning_rates(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        "unrolled.interop.hf.recipe.run",
        lambda model, out, data, recipe, **options: made.append(recipe) or {"before": 1.0},
    )
    command = ["linearize", "model", tmp_path / "out", "--data", tmp_path / "x.txt", "--transfer-lr", 0.5]
    for words, feature_map in (
        ([], "hedgehog"),
        (["--feature-map", "t2r"], "t2r"),
        (["--option", "feature_map=elu"], "elu"),
    ):
        works(*command, *words)
        assert made[-1].options == {"feature_map": feature_map}
    stage = made[-1].transfer
    assert (stage.lr, stage.min_lr, made[-1].finetune.lr) == (0.5, 0.05, 3e-4)


def test_the_command_passes_on_all_other_options(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        "unrolled.interop.hf.recipe.run",
        lambda *given, **options: made.append((given, options)) or {"before": 1.0},
    )
    words = ["--attention", "window", "--option", "window=5", "--layers", "0,2", "--lora", 3, "--seed", 7]
    words += ["--transfer-steps", 0, "--finetune-steps", 2000, "--finetune-lr", 0.25, "--batch-size", 2]
    words += ["--eval-batches", 9, "--length", 33, "--val-fraction", 0.25, "--fresh", "--force"]
    works("linearize", "model", tmp_path / "out", "--data", "x.txt", "--data", "y.txt", *words)
    [((model, out, texts, recipe), options)] = made
    assert (model, out, texts) == ("model", tmp_path / "out", [Path("x.txt"), Path("y.txt")])
    assert options == {"length": 33, "val_fraction": 0.25, "resume": False, "force": True}
    assert (recipe.attention, recipe.options, recipe.layers) == ("window", {"window": 5}, [0, 2])
    assert (recipe.transfer, recipe.lora) == (None, 3)
    stage = recipe.finetune
    assert (stage.steps, stage.lr, stage.min_lr, stage.batch_size) == (2000, 0.25, 0.025, 2)
    assert (stage.seed, stage.eval_batches, stage.weight_decay) == (7, 9, 0.0)


def test_what_is_added_to_a_weight_is_the_product_of_the_two_factors(teacher):
    model = FineTuning(linear(teacher), lora=2)
    [layer, *_] = [x for x in model.modules() if hasattr(x, "lora_A")]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b)
    expected = (layer.base_layer.weight + b @ a).detach()
    model.merged()
    torch.testing.assert_close(layer.base_layer.weight, expected)
