"""JSON files with values of a wrong type get one sentence that names the file."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import error, works

from unrolled.data import Vocabulary
from unrolled.interop.onnx.manifest import Manifest
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import read_log

CHARACTERS = list("\n abc")
WRONG = [None, True, -1, 1.5, "x", [], [1], {}, {"a": 1}, float("nan")]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    Vocabulary("text", characters=CHARACTERS).attach(
        Decoder(DecoderConfig(len(CHARACTERS), d_model=8, n_layers=1, n_heads=2))
    ).save(run_dir)
    return run_dir


@pytest.mark.parametrize(
    "content",
    [
        *WRONG,
        *({"kind": kind} for kind in WRONG),
        *({"kind": "text", "characters": x} for x in WRONG if x is not None),
        {"kind": "text", "characters": ["a", "a", "b", "c", "d"]},
        {"kind": "text", "characters": ["ab", "a", "b", "c", "d"]},
        *({"kind": "image", "shape": x} for x in [*WRONG, [8, -8], [8, 8, 8], [8, "8"], [8.0, 8.0]]),
        *({"kind": "bpe", "pieces": x} for x in WRONG),
        {"kind": "ids", "shape": [8, 8]},
    ],
    ids=repr,
)
def test_vocabulary(content: Any, run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (copy / "vocabulary.json").write_text(json.dumps(content))
    printed = error("generate", copy, "--tokens", 1)
    damaged, changed = f"{copy / 'vocabulary.json'} is damaged", "vocabulary.json was changed after it was"
    assert any(message in printed for message in (damaged, changed, "it is not a tokenizer"))


@pytest.mark.parametrize(
    "line",
    [
        *(json.dumps(x) for x in WRONG),
        *(json.dumps({"event": x, "step": 1, "loss": 1.0}) for x in WRONG if x != "x"),
        *(json.dumps({"event": "train", "step": x, "loss": 1.0}) for x in WRONG if x != -1),
        *(json.dumps({"event": "eval", "step": 1, "loss": x}) for x in WRONG if x not in (-1, 1.5)),
        '{"event": "eval", "step": 1}',
        "\udcff",
    ],
)
def test_log(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(
        f'{{"event": "start", "step": 0}}\n{line}\n'.encode(errors="surrogateescape")
    )
    with pytest.raises(ValueError, match=r"log\.jsonl is damaged: line 2 is not"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_manifest(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    copy = tmp_path / "out"
    works("export", run_dir, copy)
    manifest = copy / "manifest.json"
    values = json.loads(manifest.read_text())
    for field in values:
        for wrong in WRONG:
            if json.dumps(wrong) != json.dumps(values[field]):
                manifest.write_text(json.dumps(values | {field: wrong}))
                with pytest.raises(
                    ValueError, match=f"^{re.escape(str(manifest))} (is damaged|has the format|was)"
                ):
                    Manifest.load(copy)
    assert f"{manifest} " in error("generate", copy, "--engine", "onnx", "--tokens", 1)
