"""No command overwrites what it did not make: a sentence, exit code 2 and an unchanged folder."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import everything, filled, run, works
from transformers import LlamaConfig, LlamaForCausalLM

from unrolled.data import Vocabulary
from unrolled.folders import STAGING, writing_folder
from unrolled.interop.hf import character_tokenizer
from unrolled.models import Decoder, DecoderConfig, LuongSeq2Seq, LuongSeq2SeqConfig

pytestmark = pytest.mark.usefixtures("untraced")

CHARACTERS = list("\n abcdefgh")
SMALL = ["model.d_model=8", "model.n_layers=1", "model.n_heads=2", "train.batch_size=2", "train.steps=2"]
TINY = ["--lengths", "8", "--d-model", "8", "--n-heads", "2", "--seconds", "0"]


def a_run(folder: Path, seed: int) -> Path:
    """What a run leaves, as far as it matters here: two seeds differ in nothing but the weights."""
    torch.manual_seed(seed)
    Vocabulary("text", characters=CHARACTERS).attach(
        Decoder(DecoderConfig(len(CHARACTERS), d_model=8, n_layers=1, n_heads=2, max_length=32))
    ).save(folder)
    (folder / "last.safetensors").write_bytes(b"weeks of work")
    (folder / "log.jsonl").write_text("{}\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of every kind of command, not to be written to."""
    root = tmp_path_factory.mktemp("made")
    a_run(root / "a", 0)
    works("convert", root / "a", root / "hf")
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = character_tokenizer(CHARACTERS)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    (root / "text.txt").write_text("a bad cafe\n" * 60)
    Vocabulary("ids").attach(LuongSeq2Seq(LuongSeq2SeqConfig(9, d_model=8, n_layers=1))).save(root / "luong")
    return root


LINEARIZE = ["--data", "{made}/text.txt", "--length", "8", "--batch-size", "2", "--attention", "window"]
LINEARIZE += ["--option", "window=4", "--transfer-steps", "0", "--finetune-steps", "0"]
FOLDERS = {
    "convert": ["convert", "{made}/a", "{out}"],
    "convert back": ["convert", "{made}/hf", "{out}"],
    "export": ["export", "{made}/a", "{out}"],
    "quantize": ["quantize", "{made}/a", "--out", "{out}"],
    "linearize": ["linearize", "{made}/llama", "{out}", *LINEARIZE],
    "compare": ["compare", "linear", *TINY, "--out", "{out}"],
    "bench": ["bench", "linear-forward", "--quick", "--out", "{out}"],
    "train": ["train", "data.name=copy", "data.length=4", *SMALL, "run_dir={out}"],
    "train --fresh": ["train", "data.name=copy", "data.length=4", *SMALL, "run_dir={out}", "--fresh"],
    "demo": ["demo", "--steps", "10", "--out", "{out}"],
}
FILES = {
    "list": ["list", "--draw", "window", "--set", "window=4", "--out", "{out}"],
    "attend": ["attend", "{made}/luong", "--text", "3 4", "--out", "{out}"],
}


def refused(words: list[str], folder: Path) -> str:
    before = everything(folder)
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert everything(folder) == before
    [printed] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "--force" in printed
    return printed


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_of_another_run_is_left_alone(command: str, made: Path, tmp_path: Path) -> None:
    out = a_run(tmp_path / "b", seed=1)
    printed = refused(filled(FOLDERS[command], made, out), out)
    assert f"{out} is not empty, but must be empty or hold " in printed


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_with_anything_else_is_left_alone(command: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes")
    refused(filled(FOLDERS[command], made, tmp_path), tmp_path)
    (tmp_path / "notes.txt").rename(tmp_path / "config.json")
    refused(filled(FOLDERS[command], made, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in FOLDERS if name not in ("demo", "bench")])
def test_what_the_command_made_itself_is_written_again_and_force_writes_anywhere(
    command: str, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    words = filled(FOLDERS[command], made, out)
    works(*words)
    once = everything(out)
    works(*words)
    assert everything(out).keys() == once.keys()
    shutil.rmtree(out)
    out.mkdir()
    (out / "notes.txt").write_text("my notes")
    works(*words, "--force")
    assert everything(out).keys() == once.keys() | {"notes.txt"}
    assert (out / "notes.txt").read_text() == "my notes"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "convert back", "export", "quantize"])
def test_the_output_of_another_source_is_left_alone(command: str, made: Path, tmp_path: Path) -> None:
    """The sources differ in their weights alone."""
    other = a_run(tmp_path / "other", seed=1)
    if command == "convert back":
        works("convert", other, tmp_path / "hf")
        other = tmp_path / "hf"
    out = tmp_path / "out"
    verb = FOLDERS[command][0]
    works(verb, other, *filled(FOLDERS[command][2:], made, out))
    refused(filled(FOLDERS[command], made, out), out)


def test_a_linearized_model_of_another_one_is_left_alone(made: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made / "llama", tmp_path / "other"))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained(other).config).save_pretrained(other)
    out = tmp_path / "out"
    works(*filled(["linearize", str(other), *FOLDERS["linearize"][2:]], made, out))
    refused(filled(FOLDERS["linearize"], made, out), out)


def test_a_model_that_cannot_be_linearized_leaves_no_folder(made: Path, tmp_path: Path) -> None:
    command = ["linearize", made / "hf", tmp_path / "out", *filled(LINEARIZE, made, tmp_path)]
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert "has no attention to replace" in result.stderr
    assert everything(tmp_path) == {}


def test_a_finished_run_without_its_checkpoint_is_not_trained_over(made: Path, tmp_path: Path) -> None:
    words = filled(FOLDERS["train"], made, tmp_path)
    works(*words)
    (tmp_path / "last.safetensors").unlink()
    refused(words, tmp_path)
    (tmp_path / "model.safetensors").unlink()  # killed before its first checkpoint: nothing is lost
    works(*words)


@pytest.mark.parametrize("command", FILES)
def test_a_file_that_the_command_did_not_make_is_left_alone(command: str, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    words = filled(FILES[command], made, out)
    out.write_bytes(b"a photograph")
    assert f"{out} exists and is not from this command" in refused(words, tmp_path)
    works(*words, "--force")
    assert out.read_bytes().startswith(b"\x89PNG")
    works(*words)  # its own
    drawn = out.read_bytes()
    other = next(name for name in FILES if name != command)
    assert "is not from this command" in refused(filled(FILES[other], made, out), tmp_path)
    assert out.read_bytes() == drawn


def test_images_and_translations_replace_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ["train", "data.name=digits", *SMALL, "train.eval_batches=1", f"run_dir={tmp_path / 'digits'}"]
    works(*words)
    sheet = tmp_path / "digits" / "samples.png"
    draw = ["generate", tmp_path / "digits", "--num-samples", 1]
    works(*draw)
    works(*draw)
    sheet.write_bytes(b"a photograph")
    refused([*map(str, draw)], tmp_path)
    works(*draw, "--force")


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    """Of two locks in one process, one has to be in another thread."""
    with writing_folder(tmp_path / "new") as staging:
        (staging / "a").write_text("first")
    with writing_folder(tmp_path / "new") as staging:
        (staging / "a").write_text("second")

        def write() -> None:
            with writing_folder(tmp_path / "new") as other:
                (other / "a").write_text("third")

        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="new is in use: another process"):
            pool.submit(write).result()
    assert {x.name: x.read_text() for x in (tmp_path / "new").iterdir()} == {"a": "second"}


def test_a_file_in_the_way_of_a_folder_is_named(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, printed in (
        (tmp_path / "file", "is a file, but must be a folder"),
        (tmp_path / "file" / "out", "is not a folder"),
    ):
        for command in ("convert", "compare"):
            result = run(*filled(FOLDERS[command], made, out), "--force")
            assert result.exit_code == 2, result.output
            assert printed in result.stderr
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_which_another_file_is_left_stays(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("old", "kept"):
        (tmp_path / "part" / name).touch()
    with writing_folder(tmp_path, ["part/old"]) as staging:
        (staging / "new").touch()
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["kept", "new", "part"]


def test_what_a_killed_process_has_staged_is_dropped(tmp_path: Path) -> None:
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / "half").touch()
    with writing_folder(tmp_path) as staging:
        (staging / "new").touch()
    assert [x.name for x in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("is_run", [False, True])
def test_the_lock_of_a_run_stays_and_no_other(is_run: bool, tmp_path: Path) -> None:
    if is_run:
        (tmp_path / ".lock").touch()
    with writing_folder(tmp_path) as staging:
        (staging / "new").touch()
    assert (tmp_path / ".lock").exists() == is_run
