"""Memory networks with supervised memories: the equations, padding, what is refused, and that they learn."""

import hashlib
import random
import re

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from models.stories import V, story
from unrolled import models
from unrolled.cli import app
from unrolled.data import babi
from unrolled.data.babi import BabiDataset
from unrolled.models.memnn import MemNN, MemNNConfig

D, SIZE = 6, 7
NONE = -100


def make(**fields) -> MemNN:
    torch.manual_seed(0)
    config = MemNNConfig(**{"vocab_size": V, "d_model": D, "n_hops": 2, "memory_size": SIZE} | fields)
    model = MemNN(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from equal scores
    return model


def phi(size, words, copy):
    """Count words in one of the three copies."""
    counts = torch.zeros(size, dtype=torch.float64)
    for word in words:
        counts[copy * V + int(word)] += 1
    return counts


class Plain:
    """One question, as the equations are written: feature vectors, matrices and loops."""

    def __init__(self, model, inputs, padding):
        self.U_O, self.U_R, self.hops = model.U_O.T, model.U_R.T, model.config.n_hops
        self.margin = model.config.margin
        *self.memories, self.question = (x[~p] for x, p in zip(inputs, padding, strict=True))
        self.there = [i for i, words in enumerate(self.memories) if len(words)]

    def x(self, size, before):
        return phi(size, self.question, 0) + sum(phi(size, self.memories[i], 1) for i in before)

    def time(self, i, before):
        features = torch.zeros(3 * V + self.hops, dtype=torch.float64)
        features[3 * V] = -sum(j > i for j in self.there) / SIZE
        for n, chosen in enumerate(before, 1):
            features[3 * V + n] = float(i > chosen)
        return features

    def s_O(self, before, i):  # noqa: N802
        y = phi(3 * V + self.hops, self.memories[i], 2) + self.time(i, before)
        return (self.U_O @ self.x(3 * V + self.hops, before)) @ (self.U_O @ y)

    def s_Ot(self, before, i, j):  # noqa: N802
        """Whether i is preferred to j: the function of triples, with the difference of the write times."""
        size = 3 * V + self.hops
        y = phi(size, self.memories[i], 2) - phi(size, self.memories[j], 2)
        y = y + self.time(i, before) - self.time(j, before)
        return (self.U_O @ self.x(size, before)) @ (self.U_O @ y)

    def s_R(self, before, word):  # noqa: N802
        return (self.U_R @ self.x(3 * V, before)) @ (self.U_R @ phi(3 * V, [word], 2))

    def chosen(self, facts):
        before = []
        for fact in facts:
            best = max(self.there, key=lambda i: self.s_O(before, i).item())
            before.append(best if fact == NONE else fact)
        return before

    def winners(self, order):
        """Choose by the paper's loop over the memories, which keeps the winner."""
        before = []
        for _ in range(self.hops):
            winner = order[0]
            for i in order[1:]:
                if self.s_Ot(before, i, winner) > 0:
                    winner = i
            before.append(winner)
        return before

    def loss(self, answer, facts):
        before = self.chosen(facts)
        total = torch.zeros((), dtype=torch.float64)
        for hop, fact in enumerate(facts):
            for i in self.there if fact != NONE else []:
                if i != fact:
                    difference = self.s_O(before[:hop], fact) - self.s_O(before[:hop], i)
                    total = total + max(0 * total, self.margin - difference)
        for word in range(V) if answer != NONE else []:
            if word != answer:
                difference = self.s_R(before, answer) - self.s_R(before, word)
                total = total + max(0 * total, self.margin - difference)
        return total


def plains(model, inputs, padding):
    return [Plain(model, *row) for row in zip(inputs, padding, strict=True)]


def targets_of(padding, hops):
    """Answers and places of sentences; the second row lacks a place, the third the answer."""
    there = (~padding[:, :-1]).any(-1)
    places = [[row.nonzero()[hop % int(row.sum()), 0] for hop in range(hops)] for row in there]
    targets = torch.tensor([[n, *row] for n, row in enumerate(places, 3)])
    targets[1, 1] = NONE
    targets[2, 0] = NONE
    return targets


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_scores_and_choices_are_what_the_equations_say(hops):
    model = make(n_hops=hops)
    inputs, padding = story()
    read = model.attend(inputs, key_padding_mask=padding)
    assert read.shape == (4, hops, 5)
    assert torch.equal(read.sum(-1), torch.ones(4, hops, dtype=torch.float64))
    logits = model(inputs, key_padding_mask=padding)
    rows = plains(model, inputs, padding)
    for row, choice, found in zip(rows, read.argmax(-1).tolist(), logits, strict=True):
        assert choice == row.chosen([NONE] * hops)
        expected = torch.stack([row.s_R(choice, word) for word in range(V)])
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert len({tuple(x) for x in read.argmax(-1).tolist()}) > 1  # not always the same


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_the_loop_over_pairs_of_memories_has_the_same_winner_in_any_order(hops):
    model = make(n_hops=hops)
    inputs, padding = story(seed=1)
    choices = model.attend(inputs, key_padding_mask=padding).argmax(-1).tolist()
    for row, choice in zip(plains(model, inputs, padding), choices, strict=True):
        for seed in range(4):
            assert row.winners(random.Random(seed).sample(row.there, len(row.there))) == choice


@pytest.mark.parametrize("margin", [0.1, 20.0])
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_the_loss_and_its_gradients_are_what_the_equations_say(hops, margin):
    model = make(n_hops=hops, margin=margin)
    inputs, padding = story()
    targets = targets_of(padding, hops)
    rows = zip(plains(model, inputs, padding), targets.tolist(), strict=True)
    expected = sum(row.loss(answer, facts) for row, (answer, *facts) in rows) / (4 * (1 + hops) - 2)
    loss = model.loss(inputs, targets, key_padding_mask=padding)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    assert loss > 0
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters) for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    assert all(x.any() for x in ours)


def test_the_loss_reads_the_sentences_given_and_else_those_chosen():
    model = make()
    inputs, padding = story()
    read = model.attend(inputs, key_padding_mask=padding).argmax(-1)
    answers = torch.arange(4).unsqueeze(1)
    own, none = torch.cat([answers, read], 1), torch.cat([answers, torch.full_like(read, NONE)], 1)
    of_answers, of_none = model(inputs, key_padding_mask=padding), torch.full((4, 1), NONE)
    right = of_answers.gather(1, answers)
    expected = (0.1 - right + of_answers).clamp(min=0).sum() - 4 * 0.1  # the right word is among the sums
    torch.testing.assert_close(model.loss(inputs, none, key_padding_mask=padding), expected / 4)
    facts = model.loss(inputs, torch.cat([of_none, read], 1), key_padding_mask=padding)
    both = model.loss(inputs, own, key_padding_mask=padding)
    torch.testing.assert_close(both * 12, expected + facts * 8)
    assert model.loss(inputs, torch.full((4, 3), NONE), key_padding_mask=padding) == 0


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
def test_padding_is_never_chosen_wherever_it_stands_and_whatever_it_holds(sentences, words, seed):
    model = make(n_hops=3)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(V, (2, sentences + 1, words), generator=generator)
    rows = torch.randperm(SIZE, generator=generator)[:sentences].sort().values
    columns = sorted(torch.randperm(7, generator=generator)[:words].tolist())
    padded = torch.randint(V, (2, SIZE + 1, 7), generator=generator)
    padding = torch.ones(2, SIZE + 1, 7, dtype=torch.bool)
    for row, sentence in zip([*rows.tolist(), SIZE], inputs.unbind(1), strict=True):
        padded[:, row, columns] = sentence
        padding[:, row, columns] = False
    torch.testing.assert_close(model(padded, key_padding_mask=padding), model(inputs), atol=1e-10, rtol=1e-10)
    read = model.attend(padded, key_padding_mask=padding)
    assert torch.equal(read[:, :, rows], model.attend(inputs))
    assert read.sum() == 2 * 3
    places = torch.randint(sentences, (2, 3), generator=generator)
    answers = torch.tensor([[4], [5]])
    loss = model.loss(inputs, torch.cat([answers, places], 1))
    found = model.loss(padded, torch.cat([answers, rows[places]], 1), key_padding_mask=padding)
    torch.testing.assert_close(found, loss, atol=1e-10, rtol=1e-10)


def test_a_story_of_padding_has_nothing_to_choose_and_finite_gradients():
    model = make()
    inputs, padding = story()
    padding[1, :-1] = True
    assert not model.attend(inputs, key_padding_mask=padding)[1].any()
    question = model.U_R[inputs[1, -1][~padding[1, -1]]].sum(0)
    found = model(inputs, key_padding_mask=padding)[1]
    torch.testing.assert_close(found, model.U_R[2 * V :] @ question, atol=1e-10, rtol=1e-10)
    targets = torch.full((4, 3), NONE)
    targets[:, 0] = 2
    loss = model.loss(inputs, targets, key_padding_mask=padding)
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_near_to_double(dtype):
    model = make(n_hops=1)
    inputs, padding = story()
    targets = targets_of(padding, 1)  # which sentence is read must not depend on the rounding
    targets[1, 1] = 1
    expected = model.loss(inputs, targets, key_padding_mask=padding)
    found = model.to(dtype).loss(inputs, targets, key_padding_mask=padding)
    assert found.dtype == torch.float32
    assert (found - expected).abs() < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype] * expected
    assert model(inputs, key_padding_mask=padding).dtype == dtype


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(4, dtype=torch.long), r"targets is torch.int64 of shape \[4\], but must be .* \[4, 3\]"),
        (torch.tensor([[V, NONE, NONE]] * 4), "targets holds values from 11 to 11"),
        (
            torch.tensor([[1, NONE, 2]] * 4),
            "targets names a supporting sentence where there is none",
        ),  # padding
        (
            torch.tensor([[1, NONE, 5]] * 4),
            "targets names a supporting sentence where there is none",
        ),  # question
    ],
)
def test_wrong_targets_are_refused(targets, message):
    inputs, padding = story()
    padding[0, 2] = True
    with pytest.raises(ValueError, match=message):
        make().loss(inputs, targets, key_padding_mask=padding)


PEOPLE, THINGS = ("mary", "john", "sandra"), ("milk", "apple")
ROOMS = ("garden", "kitchen", "office", "hallway")


def stories_of(facts, count, seed):
    """Write stories of people who walk about, with a question on one of them, or on what one has taken."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        moves = [(draw.choice(PEOPLE), draw.choice(ROOMS)) for _ in range(draw.randint(3, 6))]
        story = [f"{person} went to the {room}." for person, room in moves]
        last = {person: n for n, (person, _) in enumerate(moves)}
        asked = draw.choice(sorted(last))
        places, thing = [last[asked]], asked
        if facts == 2:
            thing = draw.choice(THINGS)
            at = draw.randint(0, len(story))
            story.insert(at, f"{asked} took the {thing}.")
            places = [at, last[asked] + (at <= last[asked])]
        story.append(f"Where is {thing}?\t{moves[last[asked]][1]}\t{' '.join(str(x + 1) for x in places)}")
        lines += [f"{n} {line}" for n, line in enumerate(story, 1)]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("facts", [1, 2])
def test_it_learns_from_supporting_facts_and_is_evaluated_and_drawn(facts, tmp_path, monkeypatch):
    folder = tmp_path / "tasks_1-20_v1-2/en-10k"
    folder.mkdir(parents=True)
    files = {"train": stories_of(facts, 1000, seed=0), "test": stories_of(facts, 200, seed=1)}
    for part, text in files.items():
        (folder / f"qa{facts}_x_{part}.txt").write_text(text)
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    monkeypatch.setitem(babi.SHA256, facts, digest)
    options = {"tasks": [facts], "supporting": facts, "memory_size": 10, "data_dir": str(tmp_path)}
    training = {"steps": 300, "eval_every": 300, "batch_size": 32, "lr": 0.02, "warmup_steps": 0}
    settings = {"data": {"name": "babi"} | options, "model": {"name": "memnn"}, "train": training}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    works("train", "--config", tmp_path / "run.yaml", f"run_dir={tmp_path / 'run'}")
    shown = works("evaluate", tmp_path / "run")
    right = int(re.search(r"test split: (\d+) of 200 correct", shown)[1])
    assert right >= 196, shown
    assert "ranking loss/target" in shown
    model = models.load(tmp_path / "run")
    assert model.config.n_hops == facts
    (batch,) = BabiDataset(**options).test_batches(200)
    read = model.attend(batch.inputs, key_padding_mask=batch.key_padding_mask).argmax(-1)
    assert (read == batch.targets[:, 1:]).double().mean() > 0.97
    works("attend", tmp_path / "run", "--example", 3, "--out", tmp_path / "story.png")
    assert (tmp_path / "story.png").stat().st_size > 1000
    assert "ranking loss/target" in works("info", tmp_path / "run")


def works(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output
