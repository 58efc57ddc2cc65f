"""Damaged files of every kind are refused in one sentence, or give what they gave before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from commands import run as command
from fuzzing import BrokenError, Case, blocks, check_refusal, run

from unrolled import decode, models
from unrolled.data import Vocabulary
from unrolled.ops import native
from unrolled.ops import state as states
from unrolled.training import read_log

WRONG = [None, True, False, -1, 0, 1, 2, *(10**n for n in (9, 12, 18, 30))]
WRONG += [0.5, 1e300, float("nan"), float("inf")]
WRONG += ["", "x", "linear", "../x", "\x00", [], [1], [[1]], [10**9] * 2, {}, {"a": 1}, {"linear": {"x": 1}}]
# What is in these is for their users to edit, so another value in them is not damage.
EDITABLE = {"run.yaml", "log.jsonl", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}

Loader = Callable[[Path], Any]


def read_model(folder: Path) -> Any:
    model = models.load(folder)
    return type(model), repr(model.config), model.documents, dict(model.state_dict())


def read_hf(folder: Path) -> Any:
    from unrolled.interop import hf

    model = hf.load(folder)
    return dict(model.state_dict()), logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.tensor([[1, 2, 3]]))
    return getattr(found, "logits", found)


def read_onnx(folder: Path) -> Any:
    from unrolled.interop import onnx

    model = onnx.load(folder)
    y, state = model.prefill(torch.tensor([[1, 2, 3]]), model.init_state(1))
    return y, states.leaves(state), model.manifest.sampling, model.manifest.max_positions


def read_run(folder: Path) -> Any:
    """Load a run and go on with it by its own command: it has no more steps, but reads all its files."""
    found = read_model(folder)
    Vocabulary.load(folder)
    read_log(folder / "log.jsonl")
    for words in (["info", folder], ["train", "--config", folder / "run.yaml", f"run_dir={folder}"]):
        result = command(*words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == 2:
            [sentence] = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
            raise ValueError(sentence)
        assert result.exit_code == 0, result.output
    return found


def read_plan(folder: Path) -> Any:
    plan = decode.load(folder)
    logits, _ = plan.prefill(torch.tensor([[1, 2, 3]]), plan.init_state(1))
    return repr(plan.config), plan.weights, plan.documents, plan.tensors(), logits


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], x) for name, x in expected.items())
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def change_bytes(random: Random, file: Path, other: Path) -> str:
    content = bytearray(file.read_bytes())
    at = random.choice([random.randrange(len(content)), random.randrange(min(len(content), 1500))])
    how = random.choice(["flip", "cut", "append", "zeros", "insert", "other", "delete", "folder", "empty"])
    if how == "flip":
        for _ in range(random.choice([1, 1, 3])):
            place = random.randrange(len(content)) if random.random() < 0.3 else at
            content[place] ^= 1 << random.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "append":
        content += random.choice([b"\n", b" ", b"\x00", b"{}", random.randbytes(9)])
    elif how == "zeros":
        content[at : at + 8] = bytes(len(content[at : at + 8]))
    elif how == "insert":
        content[at:at] = random.randbytes(random.randrange(1, 9))
    elif how == "other":
        content = bytearray(other.read_bytes())
    elif how == "empty":
        content.clear()
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how != "delete":
        file.write_bytes(content)
    return f"{how} at {at}"


def change_json(random: Random, file: Path) -> str:
    """Change one value, somewhere in a document, or a line of a log."""
    whole = file.read_text()
    lines = whole.splitlines() if file.suffix == ".jsonl" else [whole]
    line = random.randrange(len(lines))
    document = json.loads(lines[line])
    holder: Any = [document]
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.85:
        holder = holder[key]
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    how, value = random.choice(["set", "set", "set", "delete", "add"]), random.choice(WRONG)
    if how == "set" or holder == [document]:
        holder[key] = value
    elif how == "delete":
        del holder[key]
    elif isinstance(holder, dict):
        holder[random.choice(["unknown", "", "x" * 99])] = value
    else:
        holder.append(value)
    [lines[line]] = [json.dumps(document if holder != [document] else holder[0])]
    file.write_text("\n".join(lines))
    return f"{how} {key!r} to {value!r}"


def damage(random: Random, folder: Path, others: list[Path]) -> tuple[str, str]:
    """Change one file of a folder; its name and what was done."""
    file = random.choice([x for x in sorted(folder.iterdir()) if not x.name.startswith(".")])
    if file.suffix in (".json", ".jsonl") and random.random() < 0.7:
        return file.name, change_json(random, file)
    namesakes = [x / file.name for x in others if (x / file.name).is_file()]
    other = random.choice(namesakes or [x for y in others for x in y.iterdir() if x.is_file()])
    return file.name, change_bytes(random, file, other)


@pytest.fixture(scope="session")
def sources(world: Path, folders: Path) -> dict[Path, Loader]:
    """What is damaged, by what reads it."""
    like = models.load(world / "run").init_state(1)
    read: dict[Path, Loader] = {folders / kind: read_model for kind in models.KINDS}
    read[folders / "session"] = lambda x: states.leaves(states.load(x / "state.safetensors", like))
    if native.available():
        read[world / "plan"] = read_plan
    return read | {world / "hf": read_hf, world / "onnx": read_onnx, world / "run": read_run}


@blocks
def test_files(seeds: range, sources: dict[Path, Loader], tmp_path: Path, record_property: object) -> None:
    whole: dict[Path, Any] = {}
    # Half of the cases for the many kinds of models, half for all the rest.
    kinds, rest = ([x for x in sources if (sources[x] is read_model) == kind] for kind in (True, False))

    def case(random: Case) -> str:
        source = random.choice(random.choice([kinds, rest]))
        read = sources[source]
        folder = tmp_path / source.name
        if source not in whole:
            whole[source] = read(Path(shutil.copytree(source, folder)))
            shutil.rmtree(folder)
        shutil.copytree(source, folder)
        try:
            name, how = damage(random, folder, [x for x in sources if x != source])
            random.what = f"{source.name}/{name}: {how}"
            return judge(read, folder, name, random.what, whole[source])
        finally:
            shutil.rmtree(folder)

    run(case, seeds, record_property)


def judge(read: Loader, folder: Path, name: str, what: str, expected: Any) -> str:
    try:
        found = read(folder)
    except Exception as error:
        refused = check_refusal(error, what)
        if name not in EDITABLE and str(folder) not in str(error):
            raise BrokenError(f"{what}: the sentence names no file: {error}") from error
        return refused
    if same(found, expected):
        return "same"
    if name in EDITABLE:
        return "edited"
    raise BrokenError(f"{what}: was loaded, but is another one")


def test_what_is_loaded_differently_is_found(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match="is another one"):
        judge(lambda _: {"x": torch.zeros(2)}, tmp_path, "x", "x", {"x": torch.ones(2)})
