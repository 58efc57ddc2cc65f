"""A disk that is full at any file: one sentence, exit code 2, old files whole and nothing half-written.

The system refuses to write beyond RLIMIT_FSIZE bytes of a file, as it does on a full disk.
"""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import everything, filled, run, works
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from unrolled.data import Vocabulary
from unrolled.interop.hf import character_tokenizer
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops import state as states

pytestmark = pytest.mark.usefixtures("untraced")

CHARACTERS = list("\n abcdefgh")
TRAIN = ["train", "data.name=text", "data.path={made}/text.txt", "data.length=8", "model.d_model=8"]
TRAIN += ["model.n_layers=1", "model.n_heads=2", "train.batch_size=2", "train.schedule=constant"]
TRAIN += ["train.eval_every=2", "run_dir={out}"]
LINEARIZE = ["linearize", "{made}/llama", "{out}", "--data", "{made}/text.txt", "--length", "8"]
LINEARIZE += ["--feature-map", "t2r", "--transfer-steps", "1", "--finetune-steps", "0", "--batch-size", "2"]
TINY = ["--lengths", "8", "--d-model", "8", "--n-heads", "2", "--seconds", "0"]
NEW = {
    "convert": ["convert", "{made}/run", "{out}"],
    "convert back": ["convert", "{made}/hf", "{out}"],
    "export": ["export", "{made}/run", "{out}"],
    "quantize": ["quantize", "{made}/run", "--out", "{out}"],
    "compare": ["compare", "linear", *TINY, "--out", "{out}"],
    "bench": ["bench", "linear-forward", "--quick", "--out", "{out}"],
    "list": ["list", "--draw", "window", "--set", "window=4", "--out", "{out}.png"],
    "generate": ["generate", "{made}/images", "--num-samples", "1", "--out", "{out}.png"],
}


@contextmanager
def full_at(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def fails(words: list[str], nbytes: int) -> None:
    with full_at(nbytes):
        result = run(*words)
    assert result.exit_code == 2, (nbytes, result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "File too large" in result.stderr.splitlines()[-1]


def limits(folder: Path) -> list[int]:
    """Return for each file of a folder a size that it does not fit into, though its size may vary."""
    return sorted({len(content) // 2 for content in everything(folder).values() if content})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    size = {"d_model": 8, "n_layers": 1, "n_heads": 2}
    Vocabulary("text", characters=CHARACTERS).attach(
        Decoder(DecoderConfig(len(CHARACTERS), max_length=32, **size))
    ).save(root / "run")
    works("convert", root / "run", root / "hf")
    Vocabulary("image", shape=[4, 4]).attach(
        Decoder(DecoderConfig(4, max_length=16, start_token=True, **size))
    ).save(root / "images")
    tokenizer = character_tokenizer(CHARACTERS)
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **config)).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    (root / "text.txt").write_text("a bad cafe\n" * 60)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("command", NEW)
def test_nothing_is_left_half_written(command: str, made: Path, tmp_path: Path) -> None:
    works(*filled(NEW[command], made, tmp_path / "trial" / "out"))
    sizes = limits(tmp_path / "trial")
    for nbytes in sizes:
        parent = tmp_path / "full"
        fails(filled(NEW[command], made, parent / "out"), nbytes)
        assert everything(parent) == {}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "quantize", "compare", "list"])
def test_what_was_there_before_stays(command: str, made: Path, tmp_path: Path) -> None:
    words = filled(NEW[command], made, tmp_path / "out")
    works(*words)
    before = everything(tmp_path)
    for nbytes in limits(tmp_path):
        fails([*words, "--force"], nbytes)
        assert everything(tmp_path) == before


def test_a_training_keeps_its_last_checkpoint_and_goes_on_when_there_is_room(
    made: Path, tmp_path: Path
) -> None:
    words = filled(TRAIN, made, tmp_path / "run")
    works(*words, "train.steps=2")
    for nbytes in limits(tmp_path / "run"):
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / f"full at {nbytes}"))
        before = everything(copy)
        fails(filled([*TRAIN, "train.steps=40", "train.log_every=1"], made, copy), nbytes)
        after = everything(copy)
        assert after.keys() == before.keys()
        assert after["last.safetensors"] == before["last.safetensors"]
        load_file(copy / "model.safetensors")  # the old one, or a better one that was still written whole
        works(*filled([*TRAIN, "train.steps=4"], made, copy))


def test_a_model_stays_until_a_fresh_training_has_begun(made: Path, tmp_path: Path) -> None:
    words = filled(TRAIN, made, tmp_path / "run")
    works(*words, "train.steps=2")
    before = everything(tmp_path / "run")
    size = (tmp_path / "run" / "run.yaml").stat().st_size + 100
    assert size < (tmp_path / "run" / "last.safetensors").stat().st_size
    for nbytes in (100, size):
        fails([*words, "train.steps=2", "--fresh"], nbytes)
        assert everything(tmp_path / "run") == before
    works("generate", tmp_path / "run", "--prompt", "a", "--tokens", 2)


def test_a_training_that_cannot_begin_leaves_no_file(made: Path, tmp_path: Path) -> None:
    fails(filled([*TRAIN, "train.steps=2"], made, tmp_path / "run"), 100)
    assert set(everything(tmp_path / "run")) <= {".lock"}


def test_a_linearized_model_is_whole_or_not_there(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    works(*filled(LINEARIZE, made, out))
    written = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for nbytes in sorted({(out / name).stat().st_size // 2 for name in written}):
        shutil.rmtree(out)
        fails(filled(LINEARIZE, made, out), nbytes)
        assert not {x.name for x in out.iterdir()} & set(written)
        works(*filled(LINEARIZE, made, out))


def test_states_and_models_say_what_the_system_said(tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(9, d_model=8, n_layers=1, n_heads=2))
    file = tmp_path / "state.safetensors"
    with full_at(100):
        with pytest.raises(OSError, match=r"File too large: '.*state\.safetensors'"):
            states.save(model.init_state(1), file)
        with pytest.raises(OSError, match="File too large"):
            model.save(tmp_path / "model")
    assert everything(tmp_path / "model") == {}
