"""Plots of attention show the weights of the model; models that have none are refused."""

import hashlib

import numpy as np
import pytest
import torch
from commands import error, works
from torch import nn

from unrolled import models
from unrolled.bench import attention_plots, plots
from unrolled.cli import run_config
from unrolled.cli.attend import alignment, words
from unrolled.data import END_ID, Vocabulary, babi
from unrolled.generation import translate
from unrolled.models import Decoder, DecoderConfig, EncoderDecoder, EncoderDecoderConfig, MemN2N, NTMModel
from unrolled.models.saving import SavedModel

STORY = "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"


class Copier(SavedModel):
    """Copies its source token by token, attending to the copied token."""

    model_name = "copier"

    def __init__(self, vocab_size):
        super().__init__(DecoderConfig(vocab_size, d_model=8, n_layers=1, n_heads=1))
        self.weight = nn.Parameter(torch.zeros(1))

    def init_state(self, source, *, key_padding_mask=None):
        return source, torch.zeros(len(source), dtype=torch.long)

    def step(self, token, state):
        source, position = state
        now = source.gather(1, position.clamp(max=source.shape[1] - 1)[:, None])[:, 0]
        return 9.0 * nn.functional.one_hot(now, self.config.vocab_size), (source, position + 1)

    def attend(self, source, target, *, key_padding_mask=None):
        assert (target[:, 0] == self.config.vocab_size).all()
        return torch.eye(source.shape[1])[: target.shape[1]].expand(len(source), -1, -1)


class Pieces:
    """A vocabulary of word pieces: a blank with the first two letters, then single letters."""

    def __init__(self, text):
        self.pieces = ["</s>", *sorted({piece for word in text.split() for piece in self.split(word)})]

    @staticmethod
    def split(word):
        return [" " + word[:2], *word[2:]]

    def encode(self, text):
        pieces = [piece for word in text.split() for piece in self.split(word)]
        return [*(self.pieces.index(piece) for piece in pieces), END_ID]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids.tolist() if i != END_ID).removeprefix(" ")


def test_words_of_several_pieces_are_one_row_and_one_column():
    vocabulary = Pieces("the bicycle is red")
    found = alignment(Copier(len(vocabulary.pieces)), vocabulary, "the bicycle is red")
    assert found.rows == found.columns == ["the", "bicycle", "is", "red", "</s>"]
    np.testing.assert_allclose(found.weights, np.eye(5))


def test_weights_are_summed_over_source_pieces_and_averaged_over_target_pieces():
    vocabulary = Pieces("the red")  # the-e, re-d, end

    class Uneven(Copier):
        def attend(self, source, target, *, key_padding_mask=None):
            rows = [[0.1, 0.2, 0.3, 0.4, 0.0]] * 2 + [[0.5, 0.1, 0.1, 0.1, 0.2]] * 2 + [[0.2] * 5]
            return torch.tensor([rows])

    found = alignment(Uneven(len(vocabulary.pieces)), vocabulary, "the red")
    np.testing.assert_allclose(found.weights, [[0.3, 0.7, 0.0], [0.6, 0.2, 0.2], [0.4, 0.4, 0.2]], atol=1e-7)
    np.testing.assert_allclose(found.weights.sum(1), 1, atol=1e-7)


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """Save a memory network for a small bAbI, and set the folder of the data."""
    place = tmp_path / "data/babi/tasks_1-20_v1-2/en-10k"
    place.mkdir(parents=True)
    files = {"train": STORY * 20, "test": STORY * 2}
    for part, text in files.items():
        (place / f"qa1_single_{part}.txt").write_text(text)
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    monkeypatch.setitem(babi.SHA256, 1, digest)
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path / "data"))
    folder = tmp_path / "run"
    resolved = run_config.resolve(
        {"data": {"name": "babi", "tasks": [1]}, "model": {"d_model": 8}, "run_dir": str(folder)}
    )
    resolved.save()
    torch.manual_seed(0)
    model = MemN2N(resolved.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    model.save(folder)
    return folder, model.eval()


def drawn(monkeypatch, name):
    """Record the arguments of a plot."""
    given = []
    draw = getattr(attention_plots, name)
    monkeypatch.setattr(attention_plots, name, lambda *args: given.append(args) or draw(*args))
    return given


def loads_a_copier(monkeypatch, words):
    """Let every folder hold a model that repeats these words."""
    vocabulary = Pieces(words)
    monkeypatch.setattr(models, "load", lambda path: Copier(len(vocabulary.pieces)))
    monkeypatch.setattr(Vocabulary, "load", classmethod(lambda cls, path: vocabulary))


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_story_of_the_test_files_is_drawn_by_hop_and_sentence(stories, tmp_path, monkeypatch):
    folder, model = stories
    given = drawn(monkeypatch, "hops")
    result = works("attend", folder, "--example", 1, "--out", tmp_path / "deep/story.png")
    assert is_png(tmp_path / "deep/story.png")
    ((_, weights, sentences, title),) = given
    assert sentences == ["mary moved to the bathroom", "john went to the hallway"]
    assert title.startswith("where is mary?  ")
    assert title in result.stdout
    batch = babi.BabiDataset([1]).encode([*sentences, "where is mary"])
    expected = model.attend(batch.inputs, key_padding_mask=batch.key_padding_mask)[0].T
    np.testing.assert_allclose(weights, expected.detach().numpy(), rtol=1e-5)


def test_a_story_of_ones_own_comes_from_options_or_a_file(stories, tmp_path, monkeypatch):
    folder, _ = stories
    given = drawn(monkeypatch, "hops")
    lines = ["John went to the bathroom.", "Where is John?"]
    (tmp_path / "story.txt").write_text("\n\n".join(lines) + "\n")
    out = tmp_path / "story.png"
    works("attend", folder, "--text", lines[0], "--text", lines[1], "--out", out)
    works("attend", folder, "--file", tmp_path / "story.txt", "--out", out)
    assert given[0][2] == given[1][2] == ["john went to the bathroom"]
    np.testing.assert_array_equal(given[0][1], given[1][1])
    (tmp_path / "blank.txt").write_text("\n \n")
    assert "blank.txt has no sentence" in error("attend", folder, "--file", tmp_path / "blank.txt")
    assert "the words robert are not among" in error("attend", folder, "--text", "Robert", "--text", "John?")
    assert "the story has 1 line, but must have sentences" in error("attend", folder, "--text", "John?")
    assert "--example is 2, but must be at most 1" in error("attend", folder, "--example", 2)
    assert "--example is for a picture without" in error("attend", folder, "--text", "John?", "--example", 0)


def test_the_heads_of_a_turing_machine_are_drawn(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    options = {"memory_size": 6, "memory_width": 4}
    settings = {"data": {"name": "copy_bits", "max_length": 3}, "run_dir": str(folder)}
    resolved = run_config.resolve(settings | {"model": {"hidden_size": 8, "cell_options": options}})
    resolved.save()
    model = NTMModel(resolved.model)
    model.save(folder)
    given = drawn(monkeypatch, "heads")
    works("attend", folder, "--example", 2, "--out", tmp_path / "heads.png")
    assert is_png(tmp_path / "heads.png")
    panels = dict(given[0][1])
    batch = list(resolved.dataset.eval_batches(1))[2]
    trace = model.trace(batch.inputs)
    np.testing.assert_allclose(panels["read head"], trace.read[0, :, 0].detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(panels["write head"], trace.write[0, :, 0].detach().numpy(), rtol=1e-5)
    assert "does not read text" in error("attend", folder, "--text", "word")
    assert "--beam-size is for a translation model" in error("attend", folder, "--beam-size", 2)


def test_a_translation_is_printed_and_drawn(tmp_path, monkeypatch):
    loads_a_copier(monkeypatch, "the bicycle is red")
    out = tmp_path / "a.png"
    result = works("attend", tmp_path, "--text", "the bicycle", "--text", "red is the", "--out", out)
    assert result.stdout.splitlines() == ["the bicycle </s>", "red is the </s>"]
    assert is_png(out)
    assert "--text is missing" in error("attend", tmp_path)
    assert "--text is empty" in error("attend", tmp_path, "--text", " ")
    assert "--example is for a memory network" in error("attend", tmp_path, "--example", 1)


def test_a_transformer_is_drawn_as_it_attends(monkeypatch):
    torch.manual_seed(0)
    vocabulary = Pieces("the bicycle is red")
    config = EncoderDecoderConfig(len(vocabulary.pieces), d_model=8, n_layers=1, n_heads=2)
    model = EncoderDecoder(config).eval()
    source = vocabulary.encode("red is the")
    found = alignment(model, vocabulary, "red is the", beam_size=2)
    (target,) = translate(model, [source], beam_size=2, stop=END_ID)
    assert found.weights.shape == (len(found.rows), 4)
    np.testing.assert_allclose(found.weights.sum(1), 1, atol=1e-6)
    read = torch.cat([torch.tensor([config.vocab_size]), target[:-1]])
    with torch.inference_mode():
        weights = model.attend(torch.tensor([source]), read[None])[0]
    columns = torch.tensor([0, 0, 1, 2, 2, 3])  # re-d, is, th-e and the end
    got = weights.new_zeros(len(target), 4).index_add(1, columns, weights).sum(0)
    pieces = words(vocabulary, target.tolist(), END_ID)[1].bincount().unsqueeze(1).numpy()
    np.testing.assert_allclose((found.weights * pieces).sum(0), got, atol=1e-6)


def test_the_alignment_is_white_where_the_weight_is(tmp_path):
    panel = attention_plots.Alignment(np.eye(3)[:2], ["die", "</s>"], ["the", "red", "</s>"])
    figure = attention_plots.alignments(plots.LIGHT, [panel])
    (axes,) = figure.axes
    (image,) = axes.get_images()
    assert image.cmap(image.norm(1.0))[:3] == (1, 1, 1)
    assert image.cmap(image.norm(0.0))[:3] == (0, 0, 0)
    assert [label.get_text() for label in axes.get_xticklabels()] == panel.columns
    assert [label.get_text() for label in axes.get_yticklabels()] == panel.rows
    assert image.get_array().shape == (2, 3)


def inside(figure):
    """Whether everything in a figure lies within its bounds."""
    figure.set_dpi(plots.DPI)
    plots.png(figure)  # which lays it out, and warns where it cannot
    drawn, whole = figure.get_tightbbox(), figure.bbox_inches.padded(0.05)
    return bool((drawn.min >= whole.min).all() and (drawn.max <= whole.max).all())


@pytest.mark.parametrize("word", ["W" * 40, "i" * 500, "\ufffd" * 70, "a"])
def test_names_of_any_length_stay_within_the_picture(word):
    panel = attention_plots.Alignment(np.eye(2), [word, "</s>"], ["a", word])
    assert inside(attention_plots.alignments(plots.LIGHT, [panel, panel]))
    assert inside(attention_plots.hops(plots.LIGHT, np.eye(2), [word[:60], "a"], "a"))


def test_dollars_are_no_formula():
    panel = attention_plots.Alignment(np.eye(1), ["$_$"], ["$_$"])
    assert inside(attention_plots.alignments(plots.LIGHT, [panel]))
    assert inside(attention_plots.hops(plots.LIGHT, np.eye(1), ["$_$"], "$_$"))


def test_letters_that_the_font_lacks_are_drawn_without_a_warning(tmp_path, monkeypatch):
    loads_a_copier(monkeypatch, "\u72ac \u8d70")
    works("attend", tmp_path, "--text", "\u72ac \u8d70", "--out", tmp_path / "a.png")  # a warning is an error
    assert is_png(tmp_path / "a.png")


def test_a_blank_of_several_bytes_at_the_end_belongs_to_the_last_word():
    class Bytes:
        def decode(self, ids):
            return bytes(ids.tolist()).decode(errors="replace")

    spelled, place = words(Bytes(), list("a \u3000".encode()), None)
    assert spelled == ["a"]
    assert place.tolist() == [0] * 5


def test_other_models_are_refused(tmp_path):
    Decoder(DecoderConfig(5, d_model=8, n_layers=1, n_heads=1)).save(tmp_path)
    assert "of the kind 'decoder', whose attention cannot be drawn" in error("attend", tmp_path)
