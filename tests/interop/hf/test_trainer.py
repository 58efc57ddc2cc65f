"""`Trainer` trains our models, and a resumed run ends with the same weights, bit for bit, as an uninterrupted one."""

import pytest
import torch
from hf_models import make
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from unrolled.interop import hf

STEPS, STOP = 6, 3


class Counting(Dataset):
    """24 rows of consecutive ids, up to 8 tokens each, some padded on the left."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        pad = index % 3
        ids = (torch.arange(8) + index) % 17
        return {"input_ids": ids, "attention_mask": (torch.arange(8) >= pad).long(), "labels": ids.clone()}


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= STOP


@pytest.fixture(autouse=True)
def generator_as_it_was():
    with torch.random.fork_rng(devices=[]):  # `Trainer` seeds it
        yield


def arguments(folder, size, **options):
    options |= {f"per_device_{part}_batch_size": size for part in ("train", "eval")}
    return TrainingArguments(folder, report_to=[], disable_tqdm=True, use_cpu=True, **options)


def train(folder, *, resume=None, callbacks=()):
    how = {"gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 0.01, "logging_steps": 1}
    saving = arguments(folder, 4, save_steps=STOP, save_strategy="steps", **how)
    model = make(dropout=0.1).float()
    trainer = Trainer(model, saving, train_dataset=Counting(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", callbacks=[StopAt()])
    assert not (tmp_path / "cut" / f"checkpoint-{STEPS}").exists()
    torch.manual_seed(99)
    resumed = train(tmp_path / "cut", resume=str(tmp_path / "cut" / f"checkpoint-{STOP}"))
    losses = [[x["loss"] for x in run.state.log_history if "loss" in x] for run in (whole, resumed)]
    assert losses[0][-3:] == losses[1][-3:]
    assert losses[0][-1] < losses[0][0]
    for name, x in whole.model.state_dict().items():
        assert torch.equal(x, resumed.model.state_dict()[name]), name
    again = hf.UnrolledForCausalLM.from_pretrained(tmp_path / "cut" / f"checkpoint-{STEPS}")
    assert torch.equal(again.model.embedding.weight, resumed.model.model.embedding.weight)


class Labelled(Counting):
    """Rows as above, each with a class."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"labels": index % 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (hf.UnrolledForCausalLM, Counting),
        (hf.UnrolledForMaskedLM, Counting),
        (hf.UnrolledForSequenceClassification, Labelled),
    ],
)
def test_accumulated_gradients_are_those_of_the_whole_batch(kind, rows, tmp_path):
    """Rows have different numbers of targets, so the loss must be divided by the number in all of them."""
    ends = []
    how = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "save_strategy": "no"}
    for parts in (1, 4):
        model = make(kind=kind)
        once = arguments(tmp_path / str(parts), 8 // parts, gradient_accumulation_steps=parts, **how)
        Trainer(model, once, train_dataset=rows()).train()
        ends.append(model.state_dict())
    for name, x in ends[0].items():
        torch.testing.assert_close(ends[1][name], x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [hf.UnrolledForCausalLM, hf.UnrolledForMaskedLM])
def test_padding_is_no_part_of_the_loss_that_is_reported(kind, tmp_path):
    model = make(kind=kind)
    rows = Counting()
    found = Trainer(model, arguments(tmp_path, 24), eval_dataset=rows).evaluate()["eval_loss"]
    columns = {name: torch.stack([row[name] for row in (rows[i] for i in range(24))]) for name in rows[0]}
    padding = columns["attention_mask"] == 0
    ids, targets = columns["input_ids"], columns["labels"]
    if kind is hf.UnrolledForCausalLM:
        ids, padding, targets = ids[:, :-1], padding[:, :-1], targets[:, 1:]
    with torch.no_grad():
        expected = model.model.loss(ids, targets, key_padding_mask=padding)
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    model = make().float()
    trainer = Trainer(model, arguments(tmp_path, 4, label_smoothing_factor=0.1))
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        logits = model(ids).logits
    expected = cross_entropy(logits[0, :-1], ids[0, 1:], label_smoothing=0.1)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", [hf.UnrolledForCausalLM, hf.UnrolledForMaskedLM])
def test_a_batch_whose_labels_are_all_at_padding_adds_no_loss(kind):
    row = Counting()[2]
    ids, mask = row["input_ids"].unsqueeze(0), row["attention_mask"].unsqueeze(0)
    labels = torch.full_like(ids, -100)
    labels[0, 1] = 3
    found = make(kind=kind)(ids, attention_mask=mask, labels=labels, num_items_in_batch=5)
    assert found.loss == 0


@pytest.mark.parametrize(("side", "counted"), [("right", 21), ("left", 23)])
def test_trainer_counts_too_many_labels_for_padding_on_the_left(side, counted, tmp_path):
    """It counts the first token of a padded row too, but only 21 tokens are predicted."""
    rows = []
    for start, length in enumerate((8, 5, 4, 8)):
        pads = (8 - length, 0) if side == "left" else (0, 8 - length)
        ids = (torch.arange(length) + start) % 17
        row = {"input_ids": pad(ids, pads), "labels": pad(ids, pads, value=-100)}
        rows.append(row | {"attention_mask": pad(torch.ones_like(ids), pads)})
    how = arguments(tmp_path, 4, max_steps=1, learning_rate=0.0, logging_steps=1, save_strategy="no")
    trainer = Trainer(make().float(), how, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trained = next(x["loss"] for x in trainer.state.log_history if "loss" in x)
    assert trained == pytest.approx(trainer.evaluate()["eval_loss"] * 21 / counted, rel=1e-5)
