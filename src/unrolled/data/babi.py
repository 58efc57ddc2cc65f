r"""bAbI: 20 tasks of small stories with questions, each answered by a word.

Weston et al. 2015, "Towards AI-complete question answering", arXiv 1502.05698. The files are version
1.2, which its authors at Facebook published under Creative Commons Attribution 3.0.

A line of a file is `number sentence`, or `number question TAB answer TAB numbers of supporting sentences`.
Number 1 begins a story. A question is about the sentences of its story before it, without other questions.
Words are read in lower case, without the full stop or question mark. An answer of several words, as in tasks
8 and 19, is one symbol ("apple,milk").
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Le, MinLen
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data._base import Task
from unrolled.data._checks import check_batch_size
from unrolled.data._epochs import EpochDataset
from unrolled.data._files import folder, load_published, read_archive
from unrolled.fields import Count, Size

URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
PATHS = ["babi/tasks_1-20_v1-2.tar.gz", "babi/babi_en-10k_no-qa3train.tar.xz"]  # the second lacks one file
FOLDER = Path("babi/tasks_1-20_v1-2/en-10k")
FILE = re.compile(r"(?:.*/)?en-10k/qa(\d+)_[\w-]+_(train|test)\.txt")
HELD_OUT = 10  # the last tenth of the stories of each task is for validation

SHA256 = {  # of the training file and then the test file of each task; for task 3, of the test file alone
    1: "f010667e5694cb120750d544cd532af3f0184fb7fa39fd9d10d20867187fb2d6",
    2: "3600385e6a8b8c6e605710eecc4f0941a1e46ed6c75a2aa6c62e24659ca52124",
    3: "17795c977100baf8188f386522ae301b62d6c1a13efc01b3aea781e588b4d57f",
    4: "d2034bd17529ac6c94b03423d81643f1eddc3b14765c9b1cb98d871aa54cd1d2",
    5: "41083758a9d07931e9b8455546e68a859864f9b9c703d8d16e24e3019338126b",
    6: "6cbe76869e5d5077e4204e76aebabdf615b47d6852dd742b2799d25eec1e877f",
    7: "6c73241a1b2ec8c0a3406d9d7bb805eec38abb679ab20489ea04f0b4b45b8139",
    8: "594a1c35262af583ece6ce79f02a3f086fc543f9daf8e2af7a5a8a0d0f05fe62",
    9: "2f07bf75cf2a50a7d32bbc5a27d539c8e23bf4b2cbe7233fbd75f22a0721a7aa",
    10: "e8e2a400118f28b381b97bc370d797dc6339b776d21dbf629773c66991137a37",
    11: "0295f2e21cfe6e203132be16f9edb9b93d7bd98ccc5daa28c897eaddae7c413b",
    12: "a9dc911e674accdc75369f3245f5b2cffef4f1dad68bd7b3ed827abfd2e091c1",
    13: "a7e79ffd4f49b8e1ae7e643d6db887ea18545e4f75bc8d01d01e13ce8f93de1c",
    14: "775bc120a409ec432d08c7abae7a5cb5f90b8b45d7ee65194014b5674779de3e",
    15: "1674ea6ddd8a8c043c4579443ebad0d8c0c1217a8127fc809e0927de904f09bf",
    16: "3ff7faa53119ca2c0dec2ca74ba2c1366d83b9a213278be9e1b9848d529d5065",
    17: "427446c98459290401b21fdf90befe4bff73ef901454f91fe2915e88afe05101",
    18: "2bacaa850756239b47349fb0fe3d82e49dfdf191e27293f096c092caf59dc9c9",
    19: "f1294b29eec66e858dde58f180b1fd242f466bc37daffd6ca25455cb861ba1fe",
    20: "5be4838320bb2ebc9a9426fffbef3a9cbba8b8516f17049899f1809c7bacbfb6",
}

Part = Literal["train", "test"]
Files = dict[tuple[int, Part], bytes]


class Line(NamedTuple):
    """One line of a story.

    Attributes:
        words: the words in order.
        answer: the answer if the line is a question, else None.
        supporting: if the line is a question, the numbers of the lines from which its answer follows, in the
            order of the file.
    """

    words: list[str]
    answer: str | None = None
    supporting: tuple[int, ...] = ()


Story = list[Line]


class Questions(NamedTuple):
    """Questions of one split. Question n asks about the sentences `begin[n]` to `end[n] - 1`.

    Attributes:
        sentences: [S, J] word ids; -1 where there is no word.
        asked: [N, J] word ids of the questions; -1 where there is no word.
        begin: [N].
        end: [N].
        answers: [N] word ids.
        facts: [N, F], the first F sentences from which each answer follows; -1 where there are fewer.
    """

    sentences: Tensor
    asked: Tensor
    begin: Tensor
    end: Tensor
    answers: Tensor
    facts: Tensor


@dataclass
class BabiDataset(EpochDataset):
    """The English tasks with 10,000 training questions each; the last tenth of the stories is for validation.

    Batches have `inputs [B, M + 1, J]`: M sentences of J words, the oldest first, and the question last;
    `key_padding_mask` of the same shape is True at padding, both of words and of whole sentences;
    `targets [B]` are the answers, which are word ids too. M is the number of sentences of the longest story
    in the batch.

    With F = `supporting` of at least 1, `targets [B, 1 + F]` are the answer and then the places, from 0 to
    M - 1, of the first F supporting sentences, in the order of the files. A place is -100 if there are fewer
    such sentences, or if the sentence is not among the last `memory_size`.

    Attributes:
        tasks: numbers of the tasks, which are learned jointly; "all" for those whose files are found.
        memory_size: maximum number of sentences of a story; of a longer story, the last ones are kept.
        data_dir: the folder that holds `babi/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.
        supporting: F, the number of supporting sentences in the targets.

    Raises:
        ValueError: the files are corrupt, or missing and cannot be downloaded, or an option is impossible.
    """

    tasks: Annotated[list[Annotated[int, Ge(1), Le(20)]], MinLen(1)] | Literal["all"] = "all"
    memory_size: Size = 50
    data_dir: str | Path | None = None
    supporting: Count = 0

    task: ClassVar[Task] = "answers"

    def __post_init__(self) -> None:
        super().__post_init__()
        files = read_files(self.data_dir)
        self.tasks = tasks = chosen_tasks(self.tasks, files)
        stories = {key: parse(files[key]) for key in files if key[0] in tasks}
        lines = list(chain.from_iterable(chain.from_iterable(stories.values())))
        words = {word for line in lines for word in line.words}
        words |= {line.answer for line in lines if line.answer}
        self.words = sorted(words)
        self._width = max(len(line.words) for line in lines)
        train, val, self._test = [], [], {}
        for task in tasks:
            own = stories[task, "train"]
            kept = len(own) - len(own) // HELD_OUT
            train += own[:kept]
            val += own[kept:]
            self._test[task] = self._encode(stories[task, "test"])
        self._splits: dict[Split, Questions] = {"train": self._encode(train), "val": self._encode(val)}

    @property
    def vocab_size(self) -> int:
        """Number of words, answers included."""
        return len(self.words)

    def _count(self, split: Split) -> int:
        return len(self._splits[split].answers)

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        return self._as_batch(self._splits[split], rows)

    def test_batches(self, batch_size: int, task: int | None = None) -> Iterator[Batch]:
        """Yield the questions of the test files in order, of all chosen tasks or of one of them."""
        if task is not None and task not in self._test:
            raise ValueError(f"task is {task!r}, but the tasks of this data set are {self.tasks}")
        tasks = self.tasks if task is None else [task]
        return chain.from_iterable(self._all(self._test[int(each)], batch_size) for each in tasks)

    def encode(self, lines: Sequence[str]) -> Batch:
        """Return a batch of one story: sentences, and a question last; the target is a placeholder.

        Raises:
            ValueError: there is no sentence, or a line has no words, or a word that is not in the files.
        """
        if len(lines) < 2:
            found = "1 line" if lines else "no lines"
            raise ValueError(f"the story has {found}, but must have sentences and then a question")
        words = [split_words(line) for line in lines]
        if [] in words:
            raise ValueError(f"line {words.index([]) + 1} has no words")
        ids = self._ids(words, max(map(len, words)))
        zero, last = torch.tensor([0]), torch.tensor([len(lines) - 1])
        return self._as_batch(
            Questions(ids[:-1], ids[-1:], zero, last, zero, torch.full((1, self.supporting), -1)), zero
        )

    def decode(self, sentence: Tensor, padding: Tensor) -> str:
        """Return the words of one row `[J]` of a batch."""
        return " ".join(self.words[word] for word in sentence[~padding].tolist())

    def _all(self, questions: Questions, batch_size: int) -> Iterator[Batch]:
        check_batch_size(batch_size)
        rows = torch.arange(len(questions.answers))
        return map(partial(self._as_batch, questions), torch.split(rows, batch_size))

    def _as_batch(self, questions: Questions, rows: Tensor) -> Batch:
        begin, end = questions.begin[rows], questions.end[rows]
        begin = torch.maximum(begin, end - self.memory_size)
        length = max(int((end - begin).max()), 1)
        place = begin.unsqueeze(1) + torch.arange(length)
        absent = place >= end.unsqueeze(1)
        memory = questions.sentences[place.clamp(max=len(questions.sentences) - 1)]
        memory = memory.masked_fill(absent.unsqueeze(-1), -1)
        inputs = torch.cat([memory, questions.asked[rows].unsqueeze(1)], dim=1)
        targets = questions.answers[rows]
        if self.supporting:
            facts = questions.facts[rows] - begin.unsqueeze(1)
            targets = torch.cat([targets.unsqueeze(1), facts.masked_fill(facts < 0, IGNORED)], dim=1)
        return Batch(inputs.clamp(min=0), targets, inputs < 0)

    def _encode(self, stories: Sequence[Story]) -> Questions:
        sentences: list[list[str]] = []
        asked, begin, end, answers, facts = [], [], [], [], []
        for story in stories:
            first = len(sentences)
            numbers: dict[int, int] = {}  # from lines of the story to sentences
            for number, (line, answer, supporting) in enumerate(story, 1):
                if answer is None:
                    numbers[number] = len(sentences)
                    sentences.append(line)
                else:
                    asked.append(line)
                    begin.append(first)
                    end.append(len(sentences))
                    answers.append([answer])
                    found = [numbers[fact] for fact in supporting if fact in numbers][: self.supporting]
                    facts.append(found + [-1] * (self.supporting - len(found)))
        return Questions(
            self._ids(sentences, self._width),
            self._ids(asked, self._width),
            torch.tensor(begin),
            torch.tensor(end),
            self._ids(answers, 1).flatten(),
            torch.tensor(facts, dtype=torch.long).reshape(len(facts), self.supporting),
        )

    def _ids(self, lines: Sequence[Sequence[str]], width: int) -> Tensor:
        known = {word: index for index, word in enumerate(self.words)}
        places: dict[tuple[str, ...], int] = {}  # a few hundred sentences recur
        index = [places.setdefault(tuple(line), len(places)) for line in lines]
        if unknown := sorted({word for line in places for word in line} - known.keys()):
            raise ValueError(f"the words {', '.join(unknown)} are not among the {len(known)} of the stories")
        rows = [[known[word] for word in line] + [-1] * (width - len(line)) for line in places]
        return torch.tensor(rows, dtype=torch.long).reshape(len(rows), width)[index]


def read_files(data_dir: str | Path | None = None) -> Files:
    """Read the files of all tasks from the folder of the unpacked archive, else from the archive.

    Raises:
        ValueError: a file is corrupt, or all are missing and cannot be downloaded.
    """
    root = folder(data_dir)
    for place in (root / FOLDER, root / FOLDER.relative_to("babi")):
        if place.is_dir():
            found = {str(path): path.read_bytes() for path in sorted(place.glob("qa*.txt"))}
            try:
                return verified(found)
            except ValueError as error:
                raise ValueError(f"{place} is corrupt: {error}; replace it by what {URL} holds") from error
    return load_published(PATHS, URL, unpack, data_dir)


def unpack(archive: bytes) -> Files:
    """Read the files of a tar archive, however it is compressed.

    Raises:
        ValueError: `archive` is not a tar archive, or the files are not those that were published.
    """
    return verified({match[0]: content for match, content in read_archive(archive, FILE)})


def verified(found: dict[str, bytes]) -> Files:
    """Return the files by task and part, for the tasks that have any, and check them.

    Raises:
        ValueError: there is no file of a task, or a file has changed.
    """
    files: Files = {}
    for name, content in found.items():
        if match := FILE.fullmatch(name):
            part: Part = "train" if match[2] == "train" else "test"
            files[int(match[1]), part] = content
    if not files:
        raise ValueError("it has no file such as en-10k/qa1_single-supporting-fact_train.txt")
    for task in sorted({task for task, _ in files}):
        parts: list[Part] = ["test"] if task == 3 else ["train", "test"]
        digest = hashlib.sha256(b"".join(files.get((task, part), b"") for part in parts)).hexdigest()
        if digest != SHA256.get(task):
            raise ValueError(
                f"the files of task {task} have the sha256 {digest} instead of {SHA256.get(task)}"
            )
    return files


def chosen_tasks(tasks: Sequence[int] | Literal["all"], files: Files) -> list[int]:
    """Return the numbers of the tasks to read, which all have both files.

    Raises:
        ValueError: a number is not a task, is given twice, or has no files.
    """
    there = sorted(task for task, part in files if part == "train" and (task, "test") in files)
    if tasks == "all":
        return there
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks is {tasks!r}, but must have each number once")
    for task in tasks:
        if task not in there:
            missing = "training" if (task, "train") not in files else "test"
            raise ValueError(
                f"task {task} has no {missing} file here; the available tasks are "
                f"{', '.join(map(str, there))}; all 20 are in {URL}"
            )
    return [int(task) for task in tasks]


def parse(content: bytes) -> list[Story]:
    """Read the stories of a file.

    Raises:
        ValueError: a line has no number, or a question names a supporting sentence that is not before it.
    """
    stories: list[Story] = []
    split = cache(split_words)
    for line in content.decode().splitlines():
        number, _, text = line.strip().partition(" ")
        if not number.isdigit():
            raise ValueError(f"the line {line!r} does not begin with a number")
        if number == "1":
            stories.append([])
        asked, *rest = text.split("\t")
        if not rest:
            stories[-1].append(Line(split(asked)))
            continue
        facts = rest[1].split() if len(rest) > 1 else []
        if not all(fact.isdigit() and 0 < int(fact) <= len(stories[-1]) for fact in facts):
            raise ValueError(f"the question {line!r} names supporting sentences that are not before it")
        stories[-1].append(Line(split(asked), rest[0].lower(), tuple(map(int, facts))))
    return stories


def split_words(sentence: str) -> list[str]:
    """Return the words in lower case, without punctuation at the end."""
    return sentence.lower().rstrip(" .?!").split()
