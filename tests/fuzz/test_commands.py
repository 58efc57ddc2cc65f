"""Command lines drawn from the real commands and options, with right and wrong values."""

import shutil
from itertools import chain
from pathlib import Path
from random import Random

import pytest
import typer
from commands import everything
from fuzzing import BrokenError, Case, blocks, run
from typer.testing import CliRunner

from unrolled.cli import app

NO_NUMBER = ["x", "", "nan", "--", "1,5", "٣x", "0x10"]
COUNT = (["1", "2"], ["0", "-1", "1.5", "1e3", "1" + "0" * 30, *NO_NUMBER])
SEED = (["0", "7", "-1"], ["1.5", "1" + "0" * 30, *NO_NUMBER])
POSITIVE = (["0.5", "1", "2.5"], ["0", "-1", "inf", "-inf", *NO_NUMBER])
SHARE = (["0.5", "1", "0.01"], ["-0.5", "1.5", "inf", *NO_NUMBER])
TEMPERATURE = (["0", "0.7", "2"], ["-1", "inf", *NO_NUMBER])
DEVICE = (["cpu"], ["cuda:99", "tpu", "", "cpu:x", "meta"])
WEIGHTS = (["fp32", "int4"], ["int2", ""])
SIZE = (["4GB", "512MiB"], ["0", "-1GB", "4 apples", ""])
FLAG: tuple[list[str], list[str]] = ([], [])
FORCE = FLAG
OUT = (["{out}"], ["{world}/text.txt/x", "{world}/text.txt"])
FILE = (["{out}.png"], ["{world}/text.txt/x.png", "{world}/model", "{out}.xyz"])
RUN = (
    ["{world}/run", "{world}/model"],
    ["{world}/none", "{world}/text.txt", "{world}/empty", "{world}/hf", ""],
)
TRANSLATOR = (["{world}/luong"], ["{world}/none", "{world}/text.txt", "{world}/empty", "{world}/run", ""])
LENGTHS = (["8", "8,16"], ["0", "-8", "8,", "8,x", "1.5", "", "1" + "0" * 30])
SAMPLING = {
    "--temperature": TEMPERATURE,
    "--top-k": (["1", "2", "1" + "0" * 30], ["0", "-1", "1.5", "1e3", *NO_NUMBER]),
    "--top-p": (["0.5", "1"], ["0", "-0.5", "1.5", "inf", *NO_NUMBER]),
    "--min-p": SHARE,
    "--repetition-penalty": POSITIVE,
}
POSITIONAL = {
    "train": [],
    "schema": [],
    "generate": [RUN],
    "convert": [
        (["{world}/run", "{world}/hf"], ["{world}/none", "{world}/text.txt", "{world}/empty", ""]),
        OUT,
    ],
    "quantize": [RUN],
    "translate": [TRANSLATOR, (["3 4", "5"], ["x", "999", "-1"])],
    "evaluate": [RUN],
    "list": [],
    "info": [(["{world}/run"], ["{world}/none", "{world}/text.txt", "{world}/empty"])],
    "demo": [],
    "bench": [(["linear-forward"], ["none", ""])],
    "compare": [(["linear", "softmax"], ["none", ""])],
    "linearize": [(["{world}/hf"], ["{world}/none", "{world}/text.txt", ""]), OUT],
    "attend": [TRANSLATOR],
    "table": [],
    "export": [RUN, OUT],
    "serve": [RUN],
    "transcribe": [RUN, (["{world}/text.txt"], ["{world}/none", "{world}/empty", "{world}", ""])],
    "tokenize": [(["{world}/text.txt"], ["{world}/none", "{world}/empty", "{world}", ""])],
    "reproduce": [(["mqar"], ["none", "{world}/none", "{world}/text.txt", "{world}/run/run.yaml", ""])],
}
OPTIONS = {
    "train": {
        "--config": (["{world}/run/run.yaml"], ["{world}/none", "{world}/model", "{world}/text.txt", ""]),
        "--data-dir": (["{world}"], []),
        "--resume": FLAG,
        "--dry-run": FLAG,
        "--device": DEVICE,
        "--tensorboard": FLAG,
        "--wandb": (["x"], []),
        "--force": FLAG,
    },
    "generate": {
        "--demo": ([], [""]),  # wrong beside a folder
        "--prompt": (["a", "a bad"], ["ü", "XYZ", "\x00", "\udcff"]),
        "--tokens": (["0", "3"], ["-1", "1.5", "1" + "0" * 30, *NO_NUMBER]),
        **SAMPLING,
        "--seed": SEED,
        "--num-samples": (["1", "2"], COUNT[1][1:]),
        "--complete": ([], ["3", *NO_NUMBER]),
        "--data-dir": ([], ["{world}"]),
        "--stop": (["b", " "], ["", "ü"]),
        "--out": ([], ["{out}.png"]),
        "--device": DEVICE,
        "--engine": (["torch"], ["onnx", "jax", ""]),
        "--graph": ([], ["plain", "x", ""]),
        "--weights": WEIGHTS,
        "--force": ([], [""]),
    },
    "convert": {"--force": FORCE},
    "quantize": {"--weights": WEIGHTS, "--out": OUT, "--data-dir": (["{world}"], []), "--force": FORCE},
    "translate": {
        "--beam-size": COUNT,
        "--length-penalty": (["0", "1.5"], ["-1", "inf", *NO_NUMBER]),
        "--no-repeat-ngram-size": (["0", "3"], ["-1", "1.5", *NO_NUMBER]),
        "--n-best": COUNT,
        "--device": DEVICE,
    },
    "evaluate": {
        "--split": (["val"], ["x", ""]),
        "--beam-size": COUNT,
        "--length-penalty": (["0", "1.5"], ["-1", "inf", *NO_NUMBER]),
        "--length": (["1", "8"], COUNT[1]),
        "--positions": FLAG,
        "--weights": WEIGHTS,
        "--out": (["{out}.txt"], ["{world}/text.txt/x", "{world}/model"]),
        "--data-dir": (["{world}"], []),
        "--device": DEVICE,
        "--force": FLAG,
    },
    "list": {
        "--markdown": FLAG,
        "--cells": FLAG,
        "--draw": (["window", "softmax"], ["none", "", "window.x"]),
        "--length": (["8"], COUNT[1]),
        "--causal": FLAG,
        "--set": (["window=4"], ["window", "none=3", "window=x", "=", ""]),
        "--out": FILE,
        "--force": FORCE,
    },
    "info": {},
    "schema": {"--out": (["{out}.json"], ["{world}/text.txt/x", "{world}/model"]), "--force": FORCE},
    "serve": {
        "--demo": ([], [""]),  # wrong beside a folder
        "--name": (["book"], []),
        "--host": (["localhost"], ["0.0.0.0", "::"]),  # wrong without keys
        "--port": (["0"], ["-1", "70000", *NO_NUMBER]),
        "--weights": WEIGHTS,
        "--rows": COUNT,
        "--memory": SIZE,
        "--queue": COUNT,
        "--timeout": (["1.5"], ["0", "-1", *NO_NUMBER]),
        "--states": (["memory:"], ["{world}", "{world}/text.txt", "ftp://x"]),
        "--ttl": (["30d"], ["0s", "-1d", "3", "d", ""]),
        "--state-bytes": SIZE,
        "--prefix-memory": SIZE,
        "--state-memory": SIZE,
        "--deterministic": FLAG,
        "--keys": ([], ["{world}/none", "{world}/empty"]),
        "--replicas": ([], ["0", "-1", *NO_NUMBER]),
        "--rate": (["6/minute"], ["6", "x/minute", ""]),
        "--origin": (["http://localhost"], []),
    },
    "demo": {
        "--out": (["{out}"], ["{world}/text.txt/x", "{world}/model"]),
        "--steps": ([], COUNT[1]),
        "--seed": ([], SEED[1]),
        "--resume": FLAG,
        "--web": FLAG,
        "--port": ([], ["-1", "70000", *NO_NUMBER]),
        "--train": ([], [""]),  # wrong without --web
        "--no-serve": FLAG,
        "--runtime": ([], ["{world}/none"]),
        "--force": FLAG,
    },
    "bench": {
        "--list": FLAG,
        "--lengths": LENGTHS,
        "--only": ([], ["none", ""]),
        "--threads": COUNT,
        "--seconds": (["0"], ["-1", "inf", *NO_NUMBER]),
        "--out": OUT,
        "--device": DEVICE,
        "--quick": FLAG,
        "--force": FLAG,
    },
    "compare": {
        "--against": (["softmax"], ["none", ""]),
        "--lengths": LENGTHS,
        "--set": ([], ["window", "none=3", "linear.none=3", "=", ""]),
        "--causal": FLAG,
        "--d-model": (["8"], COUNT[1]),
        "--n-heads": (["2"], COUNT[1]),
        "--spread": (["1"], ["-1", "inf", *NO_NUMBER]),
        "--threads": COUNT,
        "--seconds": (["0"], ["-1", "inf", *NO_NUMBER]),
        "--out": OUT,
        "--force": FLAG,
    },
    "linearize": {
        "--data": (["{world}/text.txt"], ["{world}/none", "{world}/empty", ""]),
        "--attention": (["window"], ["none", "bahdanau", ""]),
        "--feature-map": ([], ["none", ""]),
        "--option": (["window=4"], ["window", "none=3", "window=x", "=", ""]),
        "--layers": ([], ["9", "-1", "x", ""]),
        **dict.fromkeys(["--transfer-steps", "--finetune-steps"], (["0"], ["-1", "1.5", *NO_NUMBER])),
        "--lora": (["0"], ["-1", "1.5", *NO_NUMBER]),
        **dict.fromkeys(["--transfer-lr", "--finetune-lr"], (["0.1"], POSITIVE[1])),
        "--length": (["8"], COUNT[1]),
        "--batch-size": (["2"], COUNT[1]),
        "--val-fraction": (["0.5"], ["-1", "2", "inf", *NO_NUMBER]),
        "--eval-batches": COUNT,
        "--seed": SEED,
        "--fresh": FLAG,
        "--force": FLAG,
    },
    "attend": {
        "--text": (["3 4"], ["x", "999", ""]),
        "--file": ([], ["{world}/none", "{world}/empty"]),
        "--example": ([], ["-1", "1.5", *NO_NUMBER]),
        "--out": FILE,
        "--beam-size": COUNT,
        "--data-dir": (["{world}"], []),
        "--force": FORCE,
    },
    "tokenize": {
        "--out": (["{out}"], ["{world}/text.txt/x", "{world}/model", ""]),
        "--tokenizer": (["bytes"], ["words", "{world}/none", "{world}/text.txt", ""]),
        "--vocab-size": (["300"], ["256", *COUNT[1]]),
        "--sample": (["1000"], ["0", "-1", "1.5", *NO_NUMBER]),
        "--field": (["text"], []),
        "--separator": (["x"], [""]),
        "--end": (["<end>"], [""]),
        "--val-fraction": (["0.5"], ["0", "1", "-1", "2", "inf", *NO_NUMBER]),
        "--jobs": COUNT,
        "--shard-tokens": (["1000"], COUNT[1]),
        "--force": FORCE,
    },
    "reproduce": {
        "--scale": (["smoke"], ["none", ""]),
        "--only": (["linear"], ["none", "", ","]),
        "--table": FLAG,
        "--shipped": FLAG,
        "--copy": ([], ["{world}/text.txt", "{world}/run/run.yaml"]),
        "--out": (["{out}"], ["{world}/text.txt"]),
        "--data-dir": (["{world}"], []),
        "--device": DEVICE,
        "--force": ([], [""]),
    },
    "transcribe": {"--beam-size": COUNT, "--device": DEVICE},
    "table": {"--markdown": FLAG, "--lengths": LENGTHS, "--measure": FLAG},
    "export": {
        "--opset": (["20"], ["0", "19", "26", "1.5", *NO_NUMBER]),
        "--int8": FLAG,
        "--fused": FLAG,
        "--aot": FLAG,
        "--web": FLAG,
        "--webgpu": FLAG,
        "--runtime": ([], ["{world}/none"]),
        **SAMPLING,
        "--force": FORCE,
    },
}
# Longer than a case may take, unless something in the line is refused.
ONLY_REFUSED = {
    "demo",
    "serve",
    "bench",
    "compare",
    "linearize",
    "attend",
    "export",
    "reproduce",
    "tokenize",
    "transcribe",
}
MAY_BE_MISSING = {"info", "bench", "compare"}
SLOW_FLAGS = {"--aot", "--web", "--measure", "--int8", "--fused", "--list", "--tensorboard", "--wandb"}
SETTINGS = {
    "data.name": (["text"], ["none", "", "[]", "null", "{}"]),
    "data.path": (["{world}/text.txt"], ["{world}/none", "{world}/empty", "null", "[]", "3"]),
    "data.length": (["8"], ["0", "-1", "1.5", "x", "null", "[]", "true", "99999", "1" + "0" * 30]),
    "data.level": (["characters", "bytes"], ["none", "3", "[]"]),
    "data.none": ([], ["3"]),
    "none.x": ([], ["3"]),
    "model.name": (["decoder", "recurrent_lm"], ["none", "encoder", "vit", "[]", "3"]),
    "model.d_model": (["8"], ["0", "-8", "1.5", "x", "null", "[]", "true", ".nan", "1" + "0" * 30]),
    "model.n_layers": (["1"], ["0", "-1", "1.5", "x", "null", "[]", "true", ".inf"]),
    "model.dropout": (["0", "0.1"], ["-0.1", "1.5", "x", "null", ".nan", "[]"]),
    "model.vocab_size": ([], ["0", "-1", "x", "[]", "3"]),
    "model.none": ([], ["3"]),
    "train.steps": (["1", "2"], ["0", "-1", "1.5", "x", "null", "[]", "true"]),
    "train.batch_size": (["2"], ["0", "-1", "1.5", "x", "null", "[]", "true", "1" + "0" * 30]),
    "train.lr": (["1e-3", "0.1"], ["-1", "x", "null", "[]", ".nan", ".inf", "true"]),
    "train.accumulate": (["1", "2"], ["0", "-1", "1.5", "x", "null", "[]"]),
    "train.seed": (["0", "5"], ["1.5", "x", "null", "[]", "1" + "0" * 30]),
    "train.schedule": (["constant", "cosine"], ["none", "3", "[]"]),
    "train.eval_every": (["1"], ["0", "-1", "1.5", "x", "[]"]),
    "train.none": ([], ["3"]),
    "run_dir": (["{out}"], ["{world}/text.txt/x", "{world}/model", "null", "[]", "3.5"]),
}
TINY = [
    "data.name=text",
    "data.path={world}/text.txt",
    "data.length=8",
    "model.d_model=8",
    "model.n_layers=1",
]
TINY += ["train.batch_size=2", "train.steps=1", "train.threads=1", "run_dir={out}"]


def draw(random: Random, values: tuple[list[str], list[str]], wrong: bool) -> tuple[str, bool]:
    """Take one of the right or the wrong values, and say which it is."""
    pool = values[wrong] or values[not wrong]
    return random.choice(pool), pool is values[1]


def command_line(random: Random) -> tuple[list[str], bool]:
    """Draw a command line, and whether something in it must be refused."""
    command = random.choice(list(OPTIONS))
    words, refused = [command], False
    share = 0.5 if command in ONLY_REFUSED else 0.15
    while True:
        for values in POSITIONAL[command]:
            if random.random() < 0.03:
                refused |= command not in MAY_BE_MISSING
                continue
            word, wrong = draw(random, values, random.random() < share / 2)
            refused |= wrong
            words.append(word)
        if command == "train":
            words += TINY
            if random.random() < 0.8:
                words.append("model.n_heads=2")
        for name in random.sample(list(OPTIONS[command]), min(len(OPTIONS[command]), random.randrange(4))):
            right, bad = OPTIONS[command][name]
            if not right and not bad:
                words += [name] if name not in SLOW_FLAGS else []
            elif bad == [""] and not right:
                words, refused = [*words, name], True
            else:
                word, wrong = draw(random, (right, bad), random.random() < share)
                refused |= wrong
                words += [name, word]
        if command == "train":
            for name in random.sample(list(SETTINGS), random.randrange(3)):
                word, wrong = draw(random, SETTINGS[name], random.random() < 0.6)
                refused |= wrong
                words.append(f"{name}={word}")
        if random.random() < 0.1:
            other = random.choice([*chain.from_iterable(OPTIONS.values()), "--none", "-z"])
            also_right = other == "--fresh" and "--resume" in OPTIONS[command]
            if other not in OPTIONS[command] and not also_right:
                words, refused = [*words, other], True
        forced = "--force" in words and any(word.endswith("{world}/model") for word in words)  # is not wrong
        alone = "--demo" in words and words[1].startswith("--")  # without a folder, and so right
        if not forced and not alone and (refused or command not in ONLY_REFUSED):
            return words, refused
        words, refused = [command], False


def test_every_option_is_drawn() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {x.opts[0] for x in made.params if x.opts[0].startswith("--")} - {"--help"}
        for name, made in commands.items()
    }
    assert found == {name: set(options) for name, options in OPTIONS.items()}


@blocks
def test_commands(
    seeds: range, world: Path, tmp_path: Path, record_property: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a line without an output folder writes
    copy = Path(shutil.copytree(world, tmp_path / "world"))
    whole = everything(tmp_path)

    def case(random: Case) -> str:
        words, refused = command_line(random)
        words = [x.replace("{world}", str(copy)).replace("{out}", str(tmp_path / "out")) for x in words]
        random.what = f"unrolled {words}"
        result = CliRunner().invoke(app, words)
        now = everything(tmp_path)
        try:
            return judge(words, result, refused, whole, now)
        finally:
            if now != whole:
                for x in tmp_path.iterdir():
                    shutil.rmtree(x) if x.is_dir() else x.unlink()
                shutil.copytree(world, copy)

    run(case, seeds, record_property)


def judge(words: list[str], result: object, refused: bool, before: dict, now: dict) -> str:
    said = f"unrolled {words}"
    error, code, stderr = result.exception, result.exit_code, result.stderr  # type: ignore[attr-defined]
    if error is not None and not isinstance(error, SystemExit):
        raise BrokenError(f"{said}: {type(error).__name__}: {error}")
    if code not in (0, 2):
        raise BrokenError(f"{said}: exit code {code}")
    if any(name.endswith(".tmp") or "staging" in name for name in now.keys() - before.keys()):
        raise BrokenError(f"{said}: left {sorted(now.keys() - before.keys())}")
    if code == 0:
        if refused:
            raise BrokenError(f"{said}: was accepted")
        return "done"
    sentences = [line for line in stderr.splitlines() if line.startswith("error: ")]
    if len(sentences) != (0 if "Usage:" in stderr else 1) or "Traceback" in stderr or "alloc_cpu" in stderr:
        raise BrokenError(f"{said}: is not refused in one sentence: {stderr[-400:]}")
    if now != before:
        changed = sorted(x for x in now.keys() | before.keys() if now.get(x, 0) != before.get(x, 0))
        raise BrokenError(f"{said}: refused ({stderr[-200:]}), but changed {changed}")
    return "refused"


@pytest.mark.parametrize("words", [["train", "run_dir=x"]])
def test_a_line_that_is_accepted_though_wrong_is_found(words: list[str]) -> None:
    class Accepted:
        exception, exit_code, stderr = None, 0, ""

    with pytest.raises(BrokenError, match="was accepted"):
        judge(words, Accepted(), True, {}, {})
