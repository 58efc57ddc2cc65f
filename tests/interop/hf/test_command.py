"""`unrolled convert`, and importing what needs an extra."""

import json
import re
import subprocess
import sys

import pytest
import torch
from commands import error, works
from corpora import story, write_corpus
from hf_models import make
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from unrolled import data
from unrolled.data import Vocabulary
from unrolled.interop import hf
from unrolled.models import Decoder, DecoderConfig, RecurrentLM, RecurrentLMConfig, load

CHARACTERS = list("\n abcdefgh")


@pytest.fixture
def trained(tmp_path):
    """The folder of a run, as far as it matters here."""
    model = Decoder(DecoderConfig(len(CHARACTERS), d_model=16, n_layers=1, n_heads=2, max_length=32))
    Vocabulary("text", characters=CHARACTERS).attach(model)
    model.save(tmp_path / "run")
    return tmp_path / "run"


def test_there_and_back(trained, tmp_path):
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert "UnrolledForCausalLM with its tokenizer" in works("convert", trained, theirs).stderr
    tokenizer, model = AutoTokenizer.from_pretrained(theirs), AutoModelForCausalLM.from_pretrained(theirs)
    drawn = model.generate(**tokenizer("bad cafe", return_tensors="pt"), max_new_tokens=10, do_sample=False)
    model.generation_config.eos_token_id = 5
    model.generation_config.save_pretrained(theirs)
    works("convert", theirs, back)
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    for name in ("config.json", "vocabulary.json"):
        assert (back / name).read_text() == (trained / name).read_text()
    written = works("generate", back, "--prompt", "bad cafe", "--tokens", 10, "--temperature", 0).stdout
    assert written == tokenizer.decode(drawn[0]) + "\n"
    works("convert", back, tmp_path / "again")
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "again").generation_config
    assert (settings.pad_token_id, settings.eos_token_id) == (len(CHARACTERS), 5)


def test_the_symbol_after_a_document_ends_generation_and_pads(tmp_path):
    folder = write_corpus(tmp_path / "corpus", [story(i) for i in range(30)])
    vocabulary = data.load("tokens", path=str(folder), length=16).vocabulary
    model = Decoder(DecoderConfig(len(vocabulary.text_tokenizer), d_model=16, n_layers=1, n_heads=2))
    vocabulary.attach(model)
    model.save(tmp_path / "run")
    works("convert", tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    end = vocabulary.end
    assert end is not None
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, end)
    assert (settings.eos_token_id, settings.pad_token_id) == (end, end)


def test_the_tokenizer_of_another_model_does_not_stay(trained, tmp_path):
    Vocabulary("ids").attach(load(trained)).save(tmp_path / "ids")
    works("convert", trained, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    works("convert", tmp_path / "ids", tmp_path / "out", "--force")
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_what_cannot_be_converted_gets_one_sentence(trained, tmp_path):
    assert error("convert", trained, trained).startswith(f"{trained} is the model's own folder")
    RecurrentLM(RecurrentLMConfig(9)).save(tmp_path / "rnn")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "linearized").mkdir()
    (tmp_path / "linearized" / "config.json").write_text('{"model_type": "unrolled-linearized"}')
    make().save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    Vocabulary("text", characters=["a"]).attach(load(trained)).save(trained)
    for source, message in {
        "nowhere": "is not a model's folder",
        "rnn": "a RecurrentLM has no class for transformers",
        "llama": "holds a model of type 'llama', but must hold 'unrolled'",
        "linearized": "load it with unrolled.interop.hf.load_linearized",
        "cut": "is not a readable safetensors file",
        "run": "not from one run",
    }.items():
        assert message in error("convert", tmp_path / source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("with_vocabulary", [True, False])
def test_folders_of_transformers_are_named(with_vocabulary, trained, tmp_path):
    folder = tmp_path / "theirs"
    model = hf.to_transformers(load(trained))
    if not with_vocabulary:
        model.model.documents.clear()
    model.save_pretrained(folder)
    assert error("generate", folder) == (
        f"{folder} holds a model of transformers: `unrolled convert {folder} OUT` converts it back"
    )
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "unrolled-linearized"}))
    sentence = f"{folder} holds a linearized model of transformers: load it with "
    sentence += "unrolled.interop.hf.load_linearized"
    assert error("generate", folder) == sentence
    for read in (hf.load, hf.import_weights):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            read(folder)


def test_without_transformers_it_says_what_to_install():
    script = """
import sys
sys.modules["transformers"] = None
try:
    import unrolled.interop.hf
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.startswith("unrolled.interop.hf needs transformers: run pip install '.[hf]' in a")
