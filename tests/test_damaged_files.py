"""JSON files with values of a wrong type get one sentence that names the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from unrolled.cli import app
from unrolled.cli._vocabulary import Vocabulary
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import read_log

CHARACTERS = list("\n abc")
WRONG = [None, True, -1, 1.5, "x", [], [1], {}, {"a": 1}, float("nan")]


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, (arguments, result.output, result.exception)
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    Vocabulary("text", characters=CHARACTERS).attach(
        Decoder(DecoderConfig(len(CHARACTERS), d_model=8, n_layers=1, n_heads=2))
    ).save(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def exported(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    out = tmp_path_factory.mktemp("exported") / "out"
    assert CliRunner().invoke(app, ["export", str(run_dir), str(out)]).exit_code == 0
    return out


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
    told = refused("generate", copy, "--tokens", 1)
    assert (
        f"{copy / 'vocabulary.json'} is damaged" in told
        or "no tokenizer can be made of it" in told
        or "vocabulary.json was changed after it was saved" in told
    )


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


FIELDS = ["unrolled", "opset", "model", "weights", "vocab_size", "start_token", "max_positions", "length"]
FIELDS += ["state", "probes", "sampling", "graphs", "files", "inputs", "outputs", "format", "version"]
FINE = {  # of the wrong values, those that the field may have
    "unrolled": ["x"],
    "weights": ["x"],
    "opset": [-1],
    "model": [{}, {"a": 1}],
    "start_token": [None, -1],
    "max_positions": [None, -1],
    "probes": [[]],
    "sampling": [{}],
    "files": [{}],
    "graphs": [{}],
}


@pytest.mark.parametrize("field", FIELDS)
def test_manifest(field: str, exported: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "out"))
    values = json.loads((copy / "manifest.json").read_text())
    for wrong in WRONG:
        if wrong in FINE.get(field, []) and not isinstance(wrong, bool):
            continue
        (copy / "manifest.json").write_text(json.dumps(values | {field: wrong}))
        told = refused("generate", copy, "--engine", "onnx", "--tokens", 1)
        assert f"{copy / 'manifest.json'} " in told
