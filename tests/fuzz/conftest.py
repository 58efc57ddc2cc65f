"""Small folders of every kind to spoil, and the counts at the end."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import works
from small_models import small_model

from unrolled import models
from unrolled.data import Vocabulary
from unrolled.models import Decoder, DecoderConfig, LuongSeq2Seq, LuongSeq2SeqConfig
from unrolled.ops import native
from unrolled.ops import state as states

CHARACTERS = list("\n abcdefgh")
TEXT = "a bad cafe\nhad a cab\n" * 60


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, what is made of it, and other sources of commands. Not to be written to."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    (root / "empty").mkdir()
    (root / "text.txt").write_text(TEXT)
    size = ["model.d_model=8", "model.n_layers=1", "model.n_heads=2", "train.batch_size=2", "train.steps=2"]
    text = ["data.name=text", f"data.path={root / 'text.txt'}", "data.length=8", "model.positions=rotary"]
    works("train", *text, *size, "train.threads=1", f"run_dir={root / 'run'}")
    decoder = Decoder(DecoderConfig(len(CHARACTERS), d_model=8, n_layers=1, n_heads=2))
    Vocabulary("text", characters=CHARACTERS).attach(decoder)
    decoder.save(root / "model")
    translator = LuongSeq2Seq(LuongSeq2SeqConfig(9, d_model=8, n_layers=1))
    Vocabulary("ids").attach(translator)
    translator.save(root / "luong")
    works("convert", root / "run", root / "hf")
    works("export", root / "run", root / "onnx")
    if native.available():
        works("quantize", root / "run", "--out", root / "plan")
    return root


@pytest.fixture(scope="session")
def folders(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of every kind and a session."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    for kind in models.KINDS:
        small_model(kind).save(root / kind)
    (root / "session").mkdir()
    model = models.load(world / "run")
    _, state = model.prefill(torch.tensor([[1, 2, 3]]), model.init_state(1))
    states.save(state, root / "session" / "state.safetensors")
    return root


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for report in [x for key in ("passed", "failed") for x in terminalreporter.stats.get(key, [])]:
        for outcomes in [value for name, value in report.user_properties if name == "outcomes"]:
            counts[Path(report.fspath).stem.removeprefix("test_")].update(outcomes)
    for fuzzer, outcomes in sorted(counts.items()):
        line = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(outcomes.items()))
        terminalreporter.write_line(f"{fuzzer}: {sum(outcomes.values()):,} cases: {line}")
