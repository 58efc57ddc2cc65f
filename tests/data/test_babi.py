"""Stories are read as published: the sentences of a question, the held-out tenth, refused files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import babi_archive, write_babi

from unrolled.cli import run_config
from unrolled.data.babi import BabiDataset, parse, split_words
from unrolled.models import MemN2N, MemN2NConfig, MemNNConfig
from unrolled.training import TrainConfig, dry_run, train

FIRST = (
    "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
    "4 Mary took the apple there.\n5 What is Mary carrying?\tapple,milk\t4 1\n"
)
TEST = "1 John went to the hallway.\n2 Where is John? \thallway\t1\n"
ROOMS = ["hallway", "kitchen", "garden", "office"]
FILES = {
    "qa1_single-supporting-fact_train.txt": "".join(
        FIRST.replace("bathroom", room) for room in ROOMS * 5 + ["bathroom"] * 2
    ),
    "qa1_single-supporting-fact_test.txt": TEST,
    "qa3_three-supporting-facts_test.txt": TEST,
    "qa8_lists-sets_train.txt": TEST * 10,
    "qa8_lists-sets_test.txt": TEST.replace("John", "Mary"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return write_babi(tmp_path, monkeypatch, FILES)


def in_words(dataset, batch):
    """Each row in words: its sentences, its question, its answer."""
    for inputs, padding, target in zip(batch.inputs, batch.key_padding_mask, batch.targets, strict=True):
        *story, question = (dataset.decode(*row) for row in zip(inputs, padding, strict=True))
        yield tuple(line for line in story if line), question, dataset.words[target]


def test_a_question_reads_the_sentences_of_its_story_so_far_and_no_other_question(folder):
    dataset = BabiDataset([1], data_dir=folder)
    questions = [row for batch in dataset.eval_batches(3) for row in in_words(dataset, batch)]
    before = ("mary moved to the bathroom", "john went to the hallway")
    assert questions == 2 * [
        (before, "where is mary", "bathroom"),
        ((*before, "mary took the apple there"), "what is mary carrying", "apple,milk"),
    ]
    (batch,) = dataset.test_batches(10)
    assert list(in_words(dataset, batch)) == [(("john went to the hallway",), "where is john", "hallway")]


def test_the_last_sentences_are_kept_in_their_order(folder):
    dataset = BabiDataset([1], memory_size=2, data_dir=folder)
    (batch,) = dataset.eval_batches(10)
    assert batch.inputs.shape == (4, 3, 5)
    story, question, _ = list(in_words(dataset, batch))[1]
    assert story == ("john went to the hallway", "mary took the apple there")
    assert question == "what is mary carrying"


def test_a_batch_is_padded_to_its_longest_story_with_the_question_last(folder):
    dataset = BabiDataset([1], data_dir=folder)
    (batch,) = dataset.eval_batches(10)
    assert batch.inputs.shape == batch.key_padding_mask.shape == (4, 4, 5)
    assert batch.key_padding_mask[0].all(-1).tolist() == [False, False, True, False]
    assert not batch.inputs[batch.key_padding_mask].any()
    assert batch.targets.dtype == batch.inputs.dtype == torch.long


def test_a_tenth_of_the_stories_is_held_out_and_an_epoch_has_all_others_once(folder):
    dataset = BabiDataset([1], data_dir=folder)
    assert (dataset.epoch_size("train"), dataset.epoch_size("val")) == (40, 4)
    batch = dataset.batch("train", step=0, batch_size=40, seed=0)
    rooms = sorted(answer for _, question, answer in in_words(dataset, batch) if question == "where is mary")
    assert rooms == sorted(ROOMS * 5)
    again = BabiDataset([1], data_dir=folder).batch("train", step=0, batch_size=40, seed=0)
    assert all(map(torch.equal, batch[:3], again[:3]))
    assert not torch.equal(batch.targets, dataset.batch("train", step=1, batch_size=40, seed=0).targets)


def test_the_vocabulary_is_sorted_and_has_an_answer_of_several_words_as_one(folder):
    dataset = BabiDataset([8, 1], data_dir=folder)
    assert dataset.words == sorted(set(dataset.words))
    assert {"apple", "apple,milk", "mary"} < set(dataset.words)
    assert dataset.vocab_size == len(dataset.words)
    assert BabiDataset([1, 8], data_dir=folder).words == dataset.words


def test_the_test_split_of_one_task(folder):
    dataset = BabiDataset(data_dir=folder)
    assert dataset.tasks == [1, 8]
    by_task = [list(in_words(dataset, next(dataset.test_batches(5, task)))) for task in (1, 8)]
    assert [rows[0][1] for rows in by_task] == ["where is john", "where is mary"]
    together = [row for batch in dataset.test_batches(5) for row in in_words(dataset, batch)]
    assert together == [*by_task[0], *by_task[1]]
    with pytest.raises(ValueError, match=r"task is 3, but the tasks of this data set are \[1, 8\]"):
        dataset.test_batches(5, 3)


def test_a_task_without_a_training_file_cannot_be_asked_for(folder):
    message = "task 3 has no training file here; the available tasks are 1, 8; all 20 are in http"
    with pytest.raises(ValueError, match=message):
        BabiDataset([3], data_dir=folder)


@pytest.mark.parametrize("tasks", [[], [0], [21], [1, 1], [True], "1", 1, [1.0]], ids=str)
def test_what_is_no_list_of_tasks_is_refused(folder, tasks):
    with pytest.raises(
        ValueError,
        match=r"tasks is .*, but must (be a list of 1 or more integers from 1 to 20|have each number once)",
    ):
        BabiDataset(tasks, data_dir=folder)


def test_the_unpacked_folder_serves_as_well(folder, tmp_path):
    place = tmp_path / "other/tasks_1-20_v1-2/en-10k"
    place.mkdir(parents=True)
    for name, text in FILES.items():
        if "qa8" not in name:
            (place / name).write_text(text)
    dataset = BabiDataset(data_dir=tmp_path / "other")
    assert dataset.tasks == [1]
    expected = BabiDataset([1], data_dir=folder)
    assert all(map(torch.equal, next(dataset.eval_batches(9))[:3], next(expected.eval_batches(9))[:3]))
    (place / "qa1_single-supporting-fact_test.txt").write_text(TEST + TEST)
    with pytest.raises(ValueError, match=r"en-10k is corrupt: the files of task 1 have the sha256 .* inst"):
        BabiDataset(data_dir=tmp_path / "other")


def test_other_files_are_refused(folder):
    path = folder / "babi/babi_en-10k_no-qa3train.tar.xz"
    for content, message in {
        babi_archive(FILES | {"qa8_lists-sets_test.txt": "1 Mary.\n"}): "the files of task 8 have the sha256",
        babi_archive({}): "it has no file such as en-10k/qa1",
        b"no archive": "it is not a tar archive",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"is corrupt: {message}"):
            BabiDataset(data_dir=folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"tasks_1-20_v1-2.tar.gz is neither at .* could not be downloaded"):
        BabiDataset(data_dir=folder)
    with pytest.raises(ValueError, match="memory_size is 0, but must be an integer of at least 1"):
        BabiDataset(memory_size=0, data_dir=folder)


def test_places_of_supporting_sentences_follow_the_answers(folder):
    plain, dataset = BabiDataset([1], data_dir=folder), BabiDataset([1], data_dir=folder, supporting=2)
    for (batch,), (other,) in (
        (dataset.eval_batches(10), plain.eval_batches(10)),
        (dataset.test_batches(10), plain.test_batches(10)),
    ):
        assert torch.equal(batch.targets[:, 0], other.targets)
        assert torch.equal(batch.inputs, other.inputs)
    (batch,) = dataset.eval_batches(10)
    assert batch.targets.dtype == torch.long
    # line 4 is the third sentence, as line 3 is a question; the first question has one fact only
    assert batch.targets[:, 1:].tolist() == [[0, -100], [2, 0]] * 2
    (batch,) = BabiDataset([1], data_dir=folder, supporting=1).eval_batches(10)
    assert batch.targets[:, 1:].tolist() == [[0], [2]] * 2
    (batch,) = BabiDataset([1], data_dir=folder, supporting=2, memory_size=2).eval_batches(10)
    assert batch.targets[:, 1:].tolist() == [[0, -100], [1, -100]] * 2  # the oldest is no longer there
    mine = dataset.encode(["Mary moved to the bathroom.", "Where is Mary?"])
    assert mine.targets[:, 1:].tolist() == [[-100, -100]]
    with pytest.raises(ValueError, match="supporting is -1, but must be an integer of at least 0"):
        BabiDataset([1], data_dir=folder, supporting=-1)


@pytest.mark.parametrize("facts", ["2", "0", "x", "1 3"])
def test_supporting_sentences_are_before_their_question(facts):
    with pytest.raises(ValueError, match="names supporting sentences that are not before it"):
        parse(f"1 Mary is here.\n2 Where is Mary?\there\t{facts}\n".encode())


def test_the_model_must_need_as_many_supporting_sentences_as_the_data_has(folder):
    def resolve(supporting, **model):
        data = {"name": "babi", "tasks": [1], "supporting": supporting, "data_dir": str(folder)}
        return run_config.resolve({"data": data, "model": model, "run_dir": "unused"})

    assert resolve(3, name="memnn").model == MemNNConfig(vocab_size=19, memory_size=50, n_hops=3)
    assert resolve(0, n_hops=2).model.n_hops == 2
    for arguments, message in (
        ((0, {"name": "memnn"}), "is 0, but must be 2 for this memnn"),
        ((1, {"name": "memnn", "n_hops": 3}), "is 1, but must be 3 for this memnn"),
        ((2, {}), "is 2, but must be 0 for this memory_network"),
    ):
        with pytest.raises(ValueError, match=f"^data.supporting {message}$"):
            resolve(arguments[0], **arguments[1])


def test_sentences_of_ones_own_are_encoded_like_those_of_the_files(folder):
    dataset = BabiDataset([1], data_dir=folder)
    lines = ["Mary moved to the bathroom.", "John went to the hallway.", "Where is Mary?"]
    mine, (theirs,) = dataset.encode(lines), dataset.eval_batches(10)
    assert next(in_words(dataset, mine))[:2] == next(in_words(dataset, theirs))[:2]
    with pytest.raises(ValueError, match="the words robert, sings are not among the 19 of the stories"):
        dataset.encode(["Mary sings.", "Where is Robert?"])
    with pytest.raises(ValueError, match="the story has 1 line, but must have sentences and then a question"):
        dataset.encode(["Where is Mary?"])
    with pytest.raises(ValueError, match="line 2 has no words"):
        dataset.encode(["Mary moved to the bathroom.", " ", "Where is Mary?"])


@settings(max_examples=25)
@given(st.lists(st.lists(st.sampled_from(["Mary", "is", "the", "e1"]), min_size=1, max_size=4), min_size=1))
def test_what_is_written_is_parsed(sentences):
    text = "".join(f"{n} {' '.join(words)}.\n" for n, words in enumerate(sentences, 1))
    assert parse(text.encode()) == [[([w.lower() for w in words], None, ()) for words in sentences]]
    assert split_words(" ".join(sentences[0]) + " ? ") == [word.lower() for word in sentences[0]]


def test_a_line_without_a_number_is_refused():
    with pytest.raises(ValueError, match=r"the line 'Mary is here.' does not begin with a number"):
        parse(b"1 John is here.\nMary is here.\n")


def test_a_run_on_them_has_a_memory_network_that_learns(folder, tmp_path):
    dataset = {"name": "babi", "tasks": [1], "memory_size": 4, "data_dir": str(folder)}
    settings = {"data": dataset, "model": {"d_model": 8, "n_hops": 1}, "run_dir": str(tmp_path / "run")}
    run = run_config.resolve(settings)
    assert run.model == MemN2NConfig(vocab_size=19, memory_size=4, d_model=8, n_hops=1)
    torch.manual_seed(0)
    config = TrainConfig(steps=100, batch_size=20, eval_every=100, lr=0.03, warmup_steps=0)
    model = MemN2N(run.model)
    assert dry_run(model, run.dataset, config).tokens == 20  # an answer for each question
    train(model, run.dataset, config, tmp_path / "run", progress=False)
    batch = run.dataset.batch("train", step=0, batch_size=40, seed=0)  # the held-out room is in none of them
    answers = model(batch.inputs, key_padding_mask=batch.key_padding_mask).argmax(-1)
    assert (answers == batch.targets).float().mean() > 0.9


@pytest.mark.parametrize("real_data", ["babi"], indirect=True)
def test_the_real_files(real_data):
    dataset = BabiDataset([1, 19], data_dir=real_data)
    assert dataset.epoch_size("train") == 18_000
    assert dataset.epoch_size("val") == 2_000
    (batch,) = dataset.test_batches(1_000, 19)
    assert batch.inputs.shape == (1_000, 6, 10)
    assert {dataset.words[target] for target in batch.targets} <= {f"{a},{b}" for a in "nsew" for b in "nsew"}
    if 3 not in dataset.tasks:
        with pytest.raises(ValueError, match="task 3 has no training file here"):
            BabiDataset([3], data_dir=real_data)


def test_answers_are_read_in_lower_case_like_words():
    (story,) = parse(b"1 Mary went to the Hall.\n2 Where is Mary?\tHall\t1\n")
    assert (story[0].words[-1], story[1].answer) == ("hall", "hall")
