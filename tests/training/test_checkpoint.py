"""What `last.safetensors` refuses, each in one sentence and with nothing changed."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from unrolled import data, models
from unrolled.files import read_header
from unrolled.folders import STAGING, replacing_files
from unrolled.training import TrainConfig, _sharded, _steps, checkpoint, read_metadata, train
from unrolled.training.checkpoint import fingerprint

from .standin import Cycles, StandIn, run, weights


@pytest.fixture
def stopped(tmp_path):
    run(tmp_path, steps=4, schedule="constant", metadata={"data": "cycles"})
    return tmp_path


def refused(run_dir, message, **options):
    """Try to resume, expect exactly this refusal, and check that neither model nor checkpoint was touched."""
    model = options.pop("model", None) or StandIn(seed=7)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    file = (run_dir / "last.safetensors").read_bytes()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        run(run_dir, model=model, **{"steps": 4, "schedule": "constant", **options})
    assert "\n" not in str(error.value)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert (run_dir / "last.safetensors").read_bytes() == file


def test_metadata_comes_back(stopped):
    assert read_metadata(stopped / "last.safetensors") == {"data": "cycles"}


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_refuses_a_truncated_file(stopped, kept):
    path = stopped / "last.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(stopped, "last.safetensors is not a readable safetensors file")


def test_refuses_a_flipped_bit_wherever_it_is(stopped):
    path = stopped / "last.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(
            ValueError, match=r"last.safetensors (is (a safetensors file, but )?not a|was changed after)"
        ):
            read_metadata(path)
    refused(stopped, "last.safetensors was changed after it was saved: its SHA-256 differs")


def test_refuses_a_safetensors_file_that_is_no_checkpoint(stopped):
    save_file({"x": torch.zeros(2)}, stopped / "last.safetensors")
    refused(stopped, "last.safetensors is a safetensors file, but not a training checkpoint")


def test_refuses_another_model_by_tensor_name_and_shape(stopped):
    message = (
        "is a checkpoint of another model: its embedding.weight is float32 [7, 16], "
        "but this model's is float32 [7, 8]"
    )
    narrow = StandIn(width=8)
    narrow.config = StandIn().config
    refused(stopped, message, model=narrow)
    more, less = StandIn(), StandIn()
    more.extra = torch.nn.Parameter(torch.zeros(1))
    refused(stopped, "is a checkpoint of another model: it has no tensor extra", model=more)
    del less.blocks.bias
    less.blocks.register_parameter("bias", None)
    refused(stopped, "another model: it has a tensor blocks.bias too many", model=less)


def test_refuses_another_config_by_field(stopped):
    refused(stopped, "cannot be resumed: model.width was 16 and is now 8", model=StandIn(width=8))
    refused(stopped, "cannot be resumed: train.lr was 0.01 and is now 0.02", lr=0.02)
    refused(stopped, "cannot be resumed: train.betas was [0.9, 0.99] and is now [0.9, 0.9]", betas=(0.9, 0.9))
    refused(stopped, "train.schedule was 'constant' and is now 'plateau'", schedule="plateau")
    refused(stopped, "cannot be resumed: train.eps was 1e-08 and is now 1e-06", eps=1e-6)
    refused(stopped, "cannot be resumed: model.dropout was 0.2 and is now 0.5", model=StandIn(dropout=0.5))


def test_a_setting_that_is_newer_than_the_checkpoint_had_its_default(tmp_path, monkeypatch):
    identity_of = _steps.identity_of

    def older(*arguments):
        found = identity_of(*arguments)
        del found["train"]["eps"]
        return found

    with monkeypatch.context() as then:
        then.setattr(_steps, "identity_of", older)
        run(tmp_path, steps=4, schedule="constant")
    refused(tmp_path, "train.eps was 1e-08 and is now 1e-06", eps=1e-6)
    assert run(tmp_path, steps=6, schedule="constant").steps == 6


def test_a_setting_that_is_no_longer_there_is_named(tmp_path, monkeypatch):
    identity_of = _steps.identity_of

    def with_more(*arguments):
        found = identity_of(*arguments)
        found["model"]["gone"] = 3
        return found

    with monkeypatch.context() as then:
        then.setattr(_steps, "identity_of", with_more)
        run(tmp_path, steps=4, schedule="constant")
    refused(tmp_path, "cannot be resumed: model.gone was 3 and is now None")


def test_refuses_a_checkpoint_without_a_digest(stopped):
    path = stopped / "last.safetensors"
    kept = {checkpoint.JSON_KEY: read_header(path).metadata[checkpoint.JSON_KEY]}
    save_file(load_file(path), path, metadata=kept)
    refused(stopped, "last.safetensors is a safetensors file, but not a training checkpoint")


def test_the_speed_is_that_of_the_tokens_that_were_read():
    recent = checkpoint.Recent()
    for read in (9, 7):
        recent.add(loss=1.0, tokens=2, seconds=2.0, read=read)
    assert recent.speed == 16 / 4
    recent = checkpoint.Recent()
    recent.add(loss=1.0, tokens=6, seconds=2.0)  # its inputs are not tokens
    assert recent.speed == 3.0


def test_refuses_other_data(stopped):
    refused(stopped, "cannot be resumed: the data have changed", data=Cycles(noise=0.5))
    refused(stopped, "cannot be resumed: the data have changed", data=Cycles(val_sizes=(4, 5)))


def test_refuses_other_options_of_data_whose_first_batches_are_equal(tmp_path):
    def trained(steps, **options):
        dataset = data.load("copy_bits", **{"max_length": 3, "val_size": 8} | options)
        model = models.KINDS["ntm"]
        sizes = {"input_size": dataset.input_size, "output_size": dataset.output_size, "hidden_size": 4}
        memory = {"memory_size": 3, "memory_width": 2}
        torch.manual_seed(0)
        made = model(model.config_type(**sizes, cell_options=memory))
        config = TrainConfig(steps=steps, batch_size=4, schedule="constant", warmup_steps=0)
        return train(made, dataset, config, tmp_path, progress=False)

    trained(2)
    with pytest.raises(ValueError, match=r"data\.options\.val_size was 8 and is now 12"):
        trained(4, val_size=12)
    assert trained(4).steps == 4


def test_the_files_of_the_data_may_move_but_not_change(tmp_path):
    book = "to be or not to be " * 100

    def trained(steps, text, book=book):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "book.txt").write_text(book)
        dataset = data.load("text", path=str(folder / "book.txt"), length=8)
        torch.manual_seed(0)
        made = models.KINDS["recurrent_lm"]
        model = made(made.config_type(vocab_size=dataset.vocab_size, d_model=8, n_layers=1))
        config = TrainConfig(steps=steps, batch_size=4, schedule="constant", warmup_steps=0)
        return train(model, dataset, config, tmp_path / "run", progress=False)

    trained(2, "here")
    assert trained(4, "there").steps == 4
    edited = book[:1000] + book[1001] + book[1000] + book[1002:]  # in none of the first batches
    with pytest.raises(ValueError, match=r"cannot be resumed: the data have changed \(to start over"):
        trained(6, "edited", edited)


def test_refuses_fewer_steps_than_it_has(stopped):
    with pytest.raises(ValueError, match=r"steps is 3, but .* is already at step 4"):
        run(stopped, steps=3, schedule="constant")


def test_fields_that_leave_the_trajectory_alone_may_change(stopped):
    free = {"steps": 6, "checkpoint_every": 1, "log_every": 5, "eval_every": 2, "threads": 2}
    assert run(stopped, schedule="constant", gradient_checkpointing=True, **free).steps == 6


@pytest.mark.parametrize(("schedule", "changes"), [("cosine", {"steps": 9}), ("plateau", {"eval_every": 9})])
def test_fields_that_bend_the_schedule_may_not(tmp_path, schedule, changes):
    run(tmp_path, steps=4, schedule=schedule)
    (field,) = changes
    refused(tmp_path, f"train.{field} was", schedule=schedule, **changes)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("old")

    def half_write():
        with replacing_files(tmp_path) as staging:
            (staging / "a").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half_write()
    assert (tmp_path / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_a_killed_process_are_removed(stopped):
    (stopped / STAGING).mkdir()
    (stopped / STAGING / "last.safetensors").write_text("half")
    run(stopped, steps=4, schedule="constant")
    assert not (stopped / STAGING).exists()


def test_leftovers_of_a_killed_process_of_the_same_number_are_replaced(tmp_path):
    leftover = tmp_path / f".out.{os.getpid()}{STAGING}"
    leftover.mkdir()
    (leftover / "half").touch()
    with replacing_files(tmp_path / "out") as staging:
        (staging / "a").touch()
    assert [x.relative_to(tmp_path).as_posix() for x in tmp_path.rglob("*")] == ["out", "out/a"]


def test_a_damaged_sharded_checkpoint_can_be_replaced(tmp_path):
    assert _sharded.next_folder(tmp_path) == "last/a"
    document = {"folder": "last/a", "sha256": "", "progress": {}}
    (tmp_path / _sharded.DOCUMENT).write_text(json.dumps(document))
    assert _sharded.next_folder(tmp_path) == "last/b"
    (tmp_path / _sharded.DOCUMENT).write_text("{")
    assert _sharded.next_folder(tmp_path) == "last/a"


def test_shared_tensors_are_stored_once_and_step_counters_kept(stopped):
    names = weights(stopped).keys()
    assert "model.embedding.weight" in names
    assert "model.head.weight" not in names
    assert weights(stopped)["optimizer.blocks.bias.step"] == 4
    assert weights(stopped)["model.calls"] == 4
    assert weights(stopped)["rng.cpu"].dtype == torch.uint8


def test_every_tensor_counts_for_a_fingerprint():
    a, b = torch.arange(3), torch.arange(4)
    found = {fingerprint(*x) for x in ([a, b], [a + 1, b], [a, b + 1], [b, a], [b])}
    assert len(found) == 5


def test_of_several_corpora_the_weights_count_and_not_the_places():
    def options(**paths):
        return _steps._options(SimpleNamespace(options={"data_dir": "x", "length": 8, **paths}))

    assert options(path={"a": 0.7, "b": 0.3}) == options(path={"c": 0.7, "d": 0.3})
    assert options(path={"a": 0.7, "b": 0.3}) != options(path={"a": 0.6, "b": 0.4})
    assert options(path="a") == options(path="b") == {"length": 8}


def test_of_two_checkpoints_the_newer_is_resumed(tmp_path):
    files = [tmp_path / "last.safetensors", tmp_path / _sharded.DOCUMENT]
    for newer in files:
        for file in files:
            file.touch()
            os.utime(file, (2, 2) if file == newer else (1, 1))
        assert checkpoint._last(tmp_path) == newer
