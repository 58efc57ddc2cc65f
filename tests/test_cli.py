"""The command line: commands that succeed, and errors of one sentence."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from commands import error, run, works
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unrolled
from unrolled import models
from unrolled.cli import _options, _sentence, app
from unrolled.cli.run_config import JOBS, read_saved
from unrolled.data import Vocabulary
from unrolled.decode import plan
from unrolled.decode.packing import Weights
from unrolled.models import Decoder, DecoderConfig, Perceiver, PerceiverConfig
from unrolled.ops import native, processor

SMALL = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2"]
SMALL += ["train.batch_size=4", "train.eval_every=10"]
needs_kernels = pytest.mark.skipif(not native.available(), reason="plans need the C++ kernels")
TEXT = "".join(f"{i} green bottles hanging on the wall.\n" for i in range(130))


@pytest.fixture(scope="module")
def text_settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    assert 4_000 < path.stat().st_size < 6_000
    return ["data.name=text", f"data.path={path}", "data.length=32", "train.steps=20", *SMALL]


@pytest.fixture(scope="module")
def trained(text_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "text"
    works("train", *text_settings, "model.positions=rotary", f"run_dir={run_dir}")
    return run_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_a_run_that_ends_while_the_learning_rate_rises_says_so(
    text_settings: list[str], tmp_path: Path
) -> None:
    settings = [x for x in text_settings if not x.startswith("train.steps")]
    short = [*settings, "train.steps=2"]
    told = (
        "the learning rate reaches only 25% of train.lr: it rises for train.warmup_steps=8 steps, and the run"
    )
    for words in ([f"run_dir={tmp_path / 'short'}"], ["--dry-run"]):
        assert f"{told} has 2" in works("train", *short, "train.warmup_steps=8", *words).stderr
    timed = works(
        "train", *settings, "train.seconds=0.01", "train.warmup_steps=1000000", f"run_dir={tmp_path}/t"
    )
    assert "% of train.lr" in timed.stderr
    enough = works("train", *short, "train.warmup_steps=2", f"run_dir={tmp_path}/enough")
    assert "of train.lr" not in enough.stderr
    both = error("train", *short, "train.seconds=1", f"run_dir={tmp_path}/both")
    assert "train.steps and train.seconds were both given, but only one ends a run" in both


def test_train_leaves_a_complete_folder(trained: Path) -> None:
    weights = {"model.safetensors", "last.safetensors"}
    others = {".lock", "config.json", "log.jsonl", "run.yaml", "vocabulary.json"}
    assert {file.name for file in trained.iterdir()} == weights | others


def test_generate_continues_the_prompt_without_the_data(trained: Path) -> None:
    output = works("generate", trained, "--prompt", "9 green", "--tokens", 40, "--seed", 3).stdout
    assert output.startswith("9 green")
    assert len(output) == len("9 green") + 40 + 1
    assert set(output) <= set(TEXT)
    assert works("generate", trained, "--prompt", "9 green", "--tokens", 40, "--seed", 3).stdout == output


def test_generate_options_reach_the_sampler(trained: Path) -> None:
    def drawn(*options: object) -> str:
        return works("generate", trained, "--prompt", "1", "--tokens", 30, "--seed", 0, *options).stdout

    greedy = drawn("--temperature", 0)
    assert drawn("--top-k", 1) == drawn("--top-p", 1e-9) == drawn("--min-p", 1) == greedy != drawn()
    assert drawn("--repetition-penalty", 5) != drawn()
    first = drawn()[1]
    assert drawn("--stop", first) == f"1{first}\n"
    samples = drawn("--num-samples", 3).split("\n---\n")
    assert len(set(samples)) == 3
    assert f"{samples[0]}\n" == drawn()


@needs_kernels
def test_generate_rounds_weights(trained: Path) -> None:
    words = ["generate", trained, "--prompt", "9 green", "--tokens", 40, "--seed", 3]
    outputs = {weights: works(*words, "--weights", weights).stdout for weights in get_args(Weights)}
    assert outputs["fp32"] == works(*words).stdout
    for weights, output in outputs.items():
        model = plan(models.load(trained), weights)
        ids = Vocabulary.load(trained).encode("9 green")
        [drawn] = model.generate([ids], 40, seed=3)
        assert output == "9 green" + Vocabulary.load(trained).decode(drawn) + "\n"
    assert get_args(Weights) == get_args(_options.Weights)


def test_generate_streams_bytes_as_whole_characters(text_settings: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "bytes"
    works("train", *text_settings, "data.level=bytes", f"run_dir={run_dir}")
    assert json.loads((run_dir / "vocabulary.json").read_text())["characters"] is None
    output = works("generate", run_dir, "--prompt", "grün", "--tokens", 20).stdout
    assert output.startswith("grün")


def test_train_resumes_where_it_stopped(text_settings: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    constant = [*text_settings, "train.schedule=constant"]
    works("train", *constant, f"run_dir={whole}")
    works("train", *constant, f"run_dir={parts}", "train.steps=10")
    assert "steps: 10" in (parts / "run.yaml").read_text()
    works("train", "--config", parts / "run.yaml", "train.steps=20")
    assert "steps: 20" in (parts / "run.yaml").read_text()
    weights, resumed = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert all(weights[name].equal(resumed[name]) for name in weights)


def test_a_run_is_resumed_in_its_precision_on_another_processor(
    text_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", *text_settings, "train.schedule=constant", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(processor, "multiplies_bf16", lambda device: True)
    works(*command, "train.steps=2")
    monkeypatch.setattr(processor, "multiplies_bf16", lambda device: False)
    works(*command, "train.steps=4")
    assert read_saved(tmp_path / "run")["train"]["bf16"]
    assert "train.bf16 was True and is now False" in error(*command, "train.steps=6", "train.bf16=false")
    works(*command, "train.steps=6", "--fresh")
    assert not read_saved(tmp_path / "run")["train"]["bf16"]


def test_a_refused_checkpoint_keeps_its_settings_until_fresh_is_asked_for(
    copied: Path, text_settings: list[str]
) -> None:
    before = (copied / "run.yaml").read_bytes()
    other = [*text_settings, "model.n_layers=2", f"run_dir={copied}"]
    assert "last.safetensors cannot be resumed: model.attention was" in error("train", *other)
    assert (copied / "run.yaml").read_bytes() == before
    works("train", *other, "--fresh")
    assert "n_layers: 2" in (copied / "run.yaml").read_text()


def test_list_draws_the_pattern_of_a_mechanism(tmp_path: Path) -> None:
    file = tmp_path / "reads.png"
    works("list", "--draw", "window", "--set", "window=4", "--length", 16, "--out", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    small = works("list", "--draw", "window", "--length", 16, "--out", file)
    assert "try a larger --length" in small.stderr
    assert "try a larger" not in works("list", "--draw", "window", "--causal", "--out", file).stderr
    fixed = error("list", "--draw", "window", "--set", "n_heads=2", "--out", file, "--force")
    assert "n_heads is given, but drawings are of 4 heads" in fixed
    dense = error("list", "--draw", "softmax", "--out", file, "--force")
    assert "no sparse pattern that is known in advance; bigbird, longformer" in dense
    large = error("list", "--draw", "window", "--length", 2**63, "--out", file, "--force")
    assert "length is 9223372036854775808, but must be below 2^63" in large
    assert error("list", "--draw", "").startswith("attention is '', but must be one of aft, ")


def test_memory_that_torch_cannot_allocate_is_said_in_plain_words() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**62, dtype=torch.uint8)  # more than any machine has
    assert _sentence(full.value) == "the memory is full: make the model, the batch or the sequences smaller"


def test_a_run_that_was_never_evaluated_has_no_model_yet(text_settings: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    printed = works("train", *text_settings, f"run_dir={run_dir}").stderr
    assert f"generate with it: unrolled generate '{run_dir}'\n" in printed
    for name in ("config.json", "model.safetensors", "vocabulary.json"):  # written by the first evaluation
        (run_dir / name).unlink()
    for command in ("generate", "info", "evaluate"):
        assert "holds no model yet: its training has not been evaluated" in error(command, run_dir)
    works("train", *text_settings, f"run_dir={run_dir}")
    works("generate", run_dir, "--prompt", "7 green", "--tokens", 2)


def test_a_model_of_another_kind_trains_and_generates(text_settings: list[str], tmp_path: Path) -> None:
    kind = ["model.name=perceiver_ar", "model.n_latents=16", "model.positions=rotary"]
    run_dir = tmp_path / "run"
    works("train", *text_settings, *kind, f"run_dir={run_dir}")
    assert json.loads((run_dir / "config.json").read_text())["model"] == "perceiver_ar"
    assert len(works("generate", run_dir, "--prompt", "7 green", "--tokens", 40).stdout) >= 40
    assert "state after 32" in works("info", run_dir).stdout


def test_a_classifier_cannot_generate(tmp_path: Path) -> None:
    config = PerceiverConfig(vocab_size=5, n_classes=2, d_model=16, n_layers=1, n_heads=2)
    Perceiver(config).save(tmp_path)
    (tmp_path / "vocabulary.json").write_text('{"kind": "ids"}')
    printed = error("generate", tmp_path)
    assert "holds a model of the kind 'perceiver', which does not predict tokens" in printed
    assert "parameters" in works("info", tmp_path).stdout


def test_images_become_a_sheet(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    image = pytest.importorskip("matplotlib.image")
    run_dir, sheet = tmp_path / "digits", tmp_path / "new" / "sheet.png"
    works("train", "data.name=digits", *SMALL, "train.steps=2", f"run_dir={run_dir}")
    works("generate", run_dir, "--num-samples", 5, "--out", sheet, "--seed", 0)
    drawn = sheet.read_bytes()
    if native.available():
        works("generate", run_dir, "--num-samples", 5, "--out", sheet, "--seed", 0, "--weights", "fp32")
        assert sheet.read_bytes() == drawn
    pixels = image.imread(sheet)[..., 0]
    assert pixels.shape == (2 * 9 * 14, 3 * 9 * 14)  # 8 pixels become 112
    drawn = pixels[::14, ::14]
    assert len(set(drawn[:8, :8].flatten())) > 5
    assert (drawn[9:, 18:] == drawn[8, 8]).all(), "the place of a sixth image is empty"
    assert [file.name for file in sheet.parent.iterdir()] == ["sheet.png"]
    assert error("generate", run_dir, "--prompt", "7").startswith("--prompt is for text, but")


def test_the_help_of_train_names_every_kind_of_model() -> None:
    printed = works("train", "--help").stdout
    assert [kind for job in JOBS.values() for kind in job.kinds if kind not in printed] == []


def test_the_help_fits_a_narrow_terminal() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        for paragraph in command.help.replace("\\[", "[").split("\n\n"):
            example = paragraph.startswith("\b")  # keeps its lines; any other paragraph is one line
            assert example or "\n" not in paragraph, name
            assert not example or max(map(len, paragraph.strip("\b").split("\n"))) <= 78, name


def test_a_run_folder_can_be_reused_after_a_failed_start(tmp_path: Path, text_settings: list[str]) -> None:
    settings = ("train", *text_settings, f"run_dir={tmp_path / 'run'}")
    assert "lower lr" in error(*settings, "train.lr=1e30", "train.warmup_steps=0")
    works(*settings, "train.steps=2")
    assert "model.d_model was 16 and is now 32" in error(*settings, "train.steps=2", "model.d_model=32")


def test_a_fresh_run_removes_the_old_model(tmp_path: Path, text_settings: list[str]) -> None:
    run_dir = f"run_dir={tmp_path}"
    works("train", *text_settings, "train.steps=1", run_dir)
    old = json.loads((tmp_path / "vocabulary.json").read_text())
    works("train", "data.name=copy", "data.length=8", *SMALL, "train.steps=1", run_dir, "--fresh")
    model = models.load(tmp_path)
    assert model.documents["vocabulary.json"] != old
    model.documents["vocabulary.json"] = old
    model.save(tmp_path)
    assert "not from one run" in error("generate", tmp_path)
    (tmp_path / "vocabulary.json").write_text('{"kind": "text", "characters": 5}')
    assert "is damaged" in error("generate", tmp_path)


def test_images_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    works("train", "data.name=digits", *SMALL, "train.steps=1", f"run_dir={tmp_path}")
    monkeypatch.setitem(sys.modules, "matplotlib.image", None)
    message = error("generate", tmp_path)
    assert message.startswith("images need matplotlib, which is missing: run pip install '.[plot]'")


def test_ids_are_read_and_written_as_numbers(tmp_path: Path) -> None:
    works("train", "data.name=copy", "data.length=16", *SMALL, "train.steps=2", f"run_dir={tmp_path}")
    output = works("generate", tmp_path, "--prompt", "1 2 3 10", "--tokens", 4).stdout
    assert output.startswith("1 2 3 10 ")
    assert len([int(token) for token in output.split()]) == 8
    message = error("generate", tmp_path, "--prompt", "one")
    assert message == "'one' must be ids, whole numbers with spaces between"


def test_learned_positions_limit_the_length(text_settings: list[str], tmp_path: Path) -> None:
    learned = "model.recipe=classic"
    works("train", *text_settings, "train.steps=1", learned, f"run_dir={tmp_path}")
    assert len(works("generate", tmp_path, "--prompt", "on the").stdout) == len("on the") + (32 - 6 + 1) + 1
    message = error("generate", tmp_path, "--prompt", "on the", "--tokens", 28)
    assert "--tokens 28 is too many: the model has 32 positions, which leave 27" in message
    assert "model.positions=rotary, sinusoidal and none set no limit" in message


@pytest.mark.parametrize("weights", [[], pytest.param(["--weights", "fp32"], marks=needs_kernels)])
def test_so_do_layers_that_are_made_for_a_length(weights: list[str], tmp_path: Path) -> None:
    linear = {"feature_map": "cosformer", "feature_map_options": {"max_length": 20}}
    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "positions": "none"}
    model = Decoder(DecoderConfig(30, **small, attention_options={"linear": linear}))
    Vocabulary(kind="ids").attach(model).save(tmp_path)
    command = ["generate", tmp_path, "--prompt", "1 2 3", *weights]
    assert len(works(*command).stdout.split()) == 22  # the last one is generated, but not read
    message = error(*command, "--tokens", 20)
    assert "--tokens 20 is too many: the model has 21 positions, which leave 19" in message
    assert "rotary" not in message


def test_list_shows_every_mechanism() -> None:
    from unrolled import attention

    lines = works("list").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(rows) == attention.names()
    assert "constant" in rows["linear"]
    assert "growing" in rows["softmax"]


def test_info_describes_the_installation_and_a_run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNROLLED_DATA", "/some/where")
    output = works("info").stdout
    assert "/some/where" in output
    output = works("info", trained).stdout
    state = [line.split()[3] for line in output.splitlines() if line.startswith("state after")]
    assert len(state) == 2
    assert state[0] == state[1], "a linear state is constant"
    assert "positions: rotary" in output
    parameters = sum(x.numel() for x in load_file(trained / "model.safetensors").values())
    assert f"{parameters:,}" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.n_layer=3", "unknown key model.n_layer: did you mean model.n_layers?"),
        ("data.path={missing}", "{missing}"),
        ("--config={missing}", "{missing}: No such file or directory"),
        ("run_dir={file}/run", "{file}/run cannot be written to: {file} is not a folder"),
        (f"train.batch_size={10**20}", f"batch_size is {10**20}, but must be an integer of 64 bits"),
        ("train.batch_size=1000000000000000", ""),  # the message about so much memory is the system's
        (f"train.eval_batches={10**20}", f"eval_batches is {10**20}, but must be an integer of 64 bits"),
    ],
)
def test_train_refuses_wrong_settings_and_makes_no_folder(
    setting: str, message: str, text_settings: list[str], tmp_path: Path
) -> None:
    places = {"missing": tmp_path / "missing.txt", "file": tmp_path / "file"}
    places["file"].touch()
    settings = [*text_settings, f"run_dir={tmp_path / 'run'}", setting.format(**places)]
    assert message.format(**places) in error("train", *settings)
    assert not (tmp_path / "run").exists()


def test_a_corrupt_data_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("To be, or")
    message = error("train", "data.name=text", "--data-dir", tmp_path, f"run_dir={tmp_path / 'run'}")
    assert "input.txt is corrupt" in message


@pytest.mark.parametrize("command", [("train", "--config"), ("generate",), ("info",)])
def test_truncated_files_are_named(copied: Path, command: tuple[str, ...]) -> None:
    damaged = copied / ("last.safetensors" if command[0] == "train" else "model.safetensors")
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    target = copied / "run.yaml" if command[0] == "train" else copied
    settings = [f"run_dir={copied}"] if command[0] == "train" else []
    assert str(damaged) in error(*command, target, *settings)


def test_weights_of_another_model_are_refused_by_name_and_shape(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["embedding.weight"] = weights["embedding.weight"][:, :8].clone()
    save_file(weights, copied / "model.safetensors")
    message = error("generate", copied)
    assert [part for part in ("embedding.weight", "8]", "16]") if part not in message] == []


def test_a_damaged_vocabulary_is_named(copied: Path) -> None:
    for content in ("{", "{}", '{"kind": "text", "letters": []}'):
        (copied / "vocabulary.json").write_text(content)
        assert f"{copied / 'vocabulary.json'} is damaged" in error("generate", copied)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate {trained} --top-p 2", "top_p is 2.0, but must be in (0, 1]"),
        ("generate {trained} --num-samples 0", "num_samples is 0, but must be at least 1"),
        (f"generate {{trained}} --num-samples {10**6}", f"{10**6}, but must be at most 100000 in one call"),
        (f"generate {{trained}} --num-samples {10**20}", f"num_samples is {10**20}, but must be"),
        ("generate {trained} --prompt 5€", "the text has '€', which the vocabulary of 26 characters"),
        ("generate {trained} --prompt=", "--prompt is empty, but must have a token"),
        ("generate {trained} --prompt=\udcff", "--prompt is not valid UTF-8"),
        ("generate {trained} --stop=\udcff", "--stop is not valid UTF-8"),
        ("generate {trained} --stop=", "--stop is empty, but must be a text"),
        ("generate {trained} --out x.png", "--out is for images"),
        ("generate {trained} --data-dir x", "--data-dir is for images"),
        (
            "generate {trained} --device abacus",
            "--device is abacus, but must be a device of torch, as in cpu or cuda:1",
        ),
        ("generate {empty}", "{empty} is not a run of unrolled train: it has no vocabulary.json"),
        ("info {empty}", "{empty} is not a model's folder"),
        ("info {empty}/x", "{empty}/x is not a model's folder: it does not exist"),
        ("list --draw linear", "linear attention has no sparse pattern"),
        ("list --draw window --set size=4", "invalid options for window"),
        (
            "list --draw window --set causal=true",
            "causal is given, but drawings are of 4 heads, and --causal chooses the kind",
        ),
        ("list --draw window --set window=3", "window is 3, but must be even"),
        ("list --set window=4", "--force require --draw"),
        ("list --draw window --cells", "--markdown and --cells are for the list, but --draw draws a pattern"),
        ("table --lengths 5,6", "--lengths is for --measure"),
        ("list --cells --length 64", "--force require --draw"),
    ],
)
def test_wrong_options_are_named(words: str, message: str, trained: Path, tmp_path: Path) -> None:
    places = {"trained": trained, "empty": tmp_path}
    assert message.format(**places) in error(*words.format(**places).split())


def test_debug_shows_the_traceback(trained: Path) -> None:
    wrong = ["generate", trained, "--top-k", 0]
    for result in (run("--debug", *wrong), run(*wrong, env={"UNROLLED_DEBUG": "1"})):
        assert isinstance(result.exception, ValueError)


def test_help_has_examples_and_does_not_import_torch() -> None:
    # Without the __init__ of the package, so that only imports of the commands count.
    script = """
import sys, types
package = types.ModuleType("unrolled")
package.__path__ = [sys.argv[1]]
sys.modules["unrolled"] = package
from unrolled.cli import app
try:
    app(["--help"], prog_name="unrolled")
finally:
    assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(Path(unrolled.__file__).parent)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "unrolled train data.name=digits run_dir=runs/digits" in process.stdout
    assert "--install-completion" in process.stdout
    assert "[linear, softmax]" in works("train", "--help").stdout


@pytest.mark.slow
def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "unrolled", "list", "--draw", "nothing"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("error: attention is 'nothing', but must be one of")


def _start(*arguments: object) -> "subprocess.Popen[str]":
    script = "from unrolled.cli import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "printed"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted by SIGTERM"),
        (signal.SIGHUP, 129, "interrupted by SIGHUP"),
    ],
)
def test_a_signal_ends_training_with_its_code_and_one_line_and_the_run_can_go_on(
    number: signal.Signals, code: int, printed: str, text_settings: list[str], tmp_path: Path
) -> None:
    process = _start(
        "train", *text_settings, "train.steps=1000000", "train.log_every=1", f"run_dir={tmp_path}"
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    other = error("train", *text_settings, "train.steps=1", f"run_dir={tmp_path}", "--fresh")
    assert other == f"{tmp_path} is in use: another process is writing there"
    settings = (tmp_path / "run.yaml").read_text()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stderr.splitlines()[-1] == printed
    assert "Traceback" not in stderr
    assert "steps: 1000000" in settings  # those of the run, not of the one that was refused
    logged = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"]
    with safe_open(tmp_path / "last.safetensors", "pt") as file:
        document = json.loads(file.metadata()["unrolled.training"])
    assert document["progress"]["step"] == logged


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(trained: Path) -> None:
    process = _start("generate", trained, "--tokens", 300)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert not stderr
    process.stderr.close()


def test_generate_begins_a_text_without_line_breaks_with_a_character_it_knows(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab cd efg hi " * 100)
    settings = [
        "data.name=text",
        f"data.path={tmp_path / 'text.txt'}",
        "data.length=16",
        "train.steps=1",
        *SMALL,
    ]
    works("train", *settings, f"run_dir={tmp_path / 'run'}")
    assert works("generate", tmp_path / "run", "--tokens", 5).stdout


def test_info_describes_a_run_with_fewer_positions_than_its_maximum_length(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "max_length": 100}
    model = models.Decoder(models.DecoderConfig(9, positions="axial", axial_shape=[4, 4], **sizes))
    model.save(tmp_path / "run")
    assert "state after 16 " in works("info", tmp_path / "run").stdout
    options = {"attention": "aft", "attention_options": {"aft": {"max_length": 64}}, "positions": "none"}
    models.Decoder(models.DecoderConfig(9, **options, **sizes)).save(tmp_path / "aft")
    assert "state after 64 " in works("info", tmp_path / "aft").stdout
