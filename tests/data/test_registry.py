import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from unrolled import data
from unrolled.contract import IGNORED


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("to be, or not to be: that is the question. " * 30)
    return path


def test_the_directory_is_the_registry():
    files = {path.stem for path in Path(data.__file__).parent.glob("[!_]*.py")}
    assert set(data.names()) == files
    assert {"copy", "text"} < files


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'cifar', but the data sets are .*copy, .*text"):
        data.load("cifar")


@pytest.mark.parametrize("name", ["_images", "__init__", "text.KNOWN"])
def test_only_data_sets_can_be_loaded(name):
    with pytest.raises(ValueError, match="but the data sets are"):
        data.load(name)


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("copy", "length, n_symbols, val_size"),
        ("digits", "none"),
        ("mnist", "data_dir"),
        ("text", "path, level"),
    ],
)
def test_an_unknown_option_lists_the_known_ones(name, takes):
    with pytest.raises(
        ValueError, match=f"'lenght' is not an option of data set {name}, which takes {takes}"
    ):
        data.load(name, lenght=3)


FOLLOW = ["copy", "digits", "passkey", "text"]  # what is to be predicted is what is read next
TOKENS = [*FOLLOW, "induction", "mqar", "selective_copy"]
BITS = ["associative_recall", "copy_bits", "repeat_copy", "adding"]


@pytest.fixture(params=[*TOKENS, *BITS])
def dataset(request, book):
    drawn = [*BITS, "induction", "mqar", "passkey", "selective_copy"]
    options = {"text": {"path": book, "length": 16}} | {name: {"val_size": 20} for name in drawn}
    return data.load(request.param, **options.get(request.param, {}))


@pytest.mark.parametrize("dataset", TOKENS, indirect=True)
def test_data_sets_of_tokens_keep_the_protocol(dataset):
    for split in ("train", "val"):
        inputs, targets, *_ = dataset.batch(split, step=3, batch_size=5, seed=0)
        assert inputs.shape == targets.shape == (5, dataset.length)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.min() >= 0
        assert inputs.max() < dataset.vocab_size + dataset.start_token
        assert torch.all((targets == IGNORED) | (targets >= 0))
        assert targets.max() < dataset.vocab_size
        known = targets[:, :-1] != IGNORED
        if dataset.name in FOLLOW:
            assert torch.equal(inputs[:, 1:][known], targets[:, :-1][known])
        assert torch.all(inputs[:, 0] == dataset.vocab_size) == dataset.start_token


def test_a_batch_is_a_pure_function_of_its_arguments(dataset):
    def batch(**changed):
        arguments = {"step": 7, "batch_size": 6, "seed": 3} | changed
        return dataset.batch("train", **arguments)[:2]

    first = batch()
    batch(step=0)  # asking for others in between changes nothing
    assert all(map(torch.equal, batch(), first))
    assert not torch.equal(batch(step=8)[0], first[0])
    assert not torch.equal(batch(seed=4)[0], first[0])


def test_the_global_generators_are_neither_read_nor_moved(dataset):
    def use():
        fresh = replace(dataset)
        batches = fresh.batch("train", step=1, batch_size=9, seed=0), *fresh.eval_batches(50)
        return [batch.inputs.tolist() for batch in batches]

    def generators():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before, batches = generators(), use()
    assert generators() == before
    random.seed(2), np.random.seed(2), torch.manual_seed(2)  # noqa: NPY002
    assert use() == batches


def test_what_a_caller_does_to_a_batch_does_not_reach_the_data(dataset):
    for split in ("train", "val"):
        inputs, targets, *_ = dataset.batch(split, step=0, batch_size=4, seed=0)
        kept = inputs.clone(), targets.clone()
        inputs.zero_(), targets.zero_()
        again = dataset.batch(split, step=0, batch_size=4, seed=0)
        assert torch.equal(again.inputs, kept[0])
        assert torch.equal(again.targets, kept[1])
    kept = [batch.inputs.clone() for batch in dataset.eval_batches(64)]
    for batch in dataset.eval_batches(64):
        batch.inputs.zero_(), batch.targets.zero_()
    assert all(map(torch.equal, kept, (batch.inputs for batch in dataset.eval_batches(64))))


def unpadded(batch):
    """The inputs and targets of each row; a batch is padded to its longest row."""
    lengths = [batch.inputs.shape[1]] * len(batch.inputs)
    if batch.key_padding_mask is not None:
        lengths = (~batch.key_padding_mask).sum(1).tolist()
    whole = batch.targets.shape[:2] != batch.inputs.shape[:2]
    for n, inputs, targets in zip(lengths, batch.inputs, batch.targets, strict=True):
        yield inputs[:n], targets if whole else targets[:n]


@pytest.mark.parametrize("batch_size", [1, 7, 1_000])
def test_evaluation_has_every_validation_example_once_whatever_the_batch_size(dataset, batch_size):
    def whole(size):
        batches = list(dataset.eval_batches(size))
        assert all(len(batch.inputs) == size for batch in batches[:-1])
        return [row for batch in batches for row in unpadded(batch)]

    rows = whole(batch_size)
    assert len(rows) == dataset.epoch_size("val")
    for row, expected in zip(rows, whole(64), strict=True):
        assert all(map(torch.equal, row, expected))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "split is 'test', but must be one of 'train', 'val'"),
        ({"step": -1}, "step is -1, but must be an integer of at least 0"),
        ({"batch_size": 0}, "batch_size is 0, but must be an integer of at least 1"),
        ({"seed": -5}, "seed is -5, but must be an integer of at least 0"),
        ({"seed": 0.5}, "seed is 0.5, but"),
    ],
)
def test_a_batch_that_does_not_exist_is_refused(dataset, wrong, message):
    arguments = {"split": "train", "step": 0, "batch_size": 1, "seed": 0} | wrong
    with pytest.raises(ValueError, match=message):
        dataset.batch(arguments.pop("split"), **arguments)


def test_other_calls_refuse_wrong_arguments_at_once(dataset):
    with pytest.raises(ValueError, match="batch_size is 0"):
        dataset.eval_batches(0)
    with pytest.raises(ValueError, match="split is 'test'"):
        dataset.epoch_size("test")
