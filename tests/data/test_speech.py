"""Sounds are read and measured as they should, and batches of utterances hold what was said."""

import numpy as np
import pytest
import soundfile
import torch
from published import tar
from sounds import LINES, PHONES, an4_files, spoken, tone, write_an4, write_digits, write_wave

from unrolled import data
from unrolled.contract import IGNORED
from unrolled.data import Vocabulary, an4, spoken_digits
from unrolled.data._sound import log_mel, read_sound
from unrolled.data._speech import WIDEST, Utterance, as_batch, hide

for library in ("soundfile", "soxr", "kaldi_native_fbank"):
    pytest.importorskip(library)


def mel(hertz):
    return 1127 * np.log(1 + np.asarray(hertz) / 700)


@pytest.mark.parametrize("hertz", [300, 1_000, 3_000])
@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_a_tone_is_loudest_in_its_band(hertz, rate):
    bands = 40
    noise = np.random.default_rng(0).normal(0, 30, rate)
    quiet, loud = noise.astype(np.int16), (noise + tone(hertz, 1, rate)).astype(np.int16)
    features = log_mel(np.concatenate([quiet, loud]), rate, bands)
    rise = features[120:180].mean(0) - features[20:80].mean(0)
    centres = np.linspace(mel(20), mel(rate / 2), bands + 2)[1:-1]  # the bands are equally wide in mel
    nearest = int(abs(centres - mel(hertz)).argmin())
    assert abs(int(rise.argmax()) - nearest) <= 1


def test_features_do_not_depend_on_loudness_and_have_mean_0_and_deviation_1():
    rng = np.random.default_rng(1)
    samples = (rng.normal(0, 200, 8_000) * np.linspace(1, 20, 8_000)).astype(np.int16)
    features = log_mel(samples, 16_000, 40)
    assert features.shape == (50, 40)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.mean(0), torch.zeros(40), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(40), atol=5e-3, rtol=0)
    torch.testing.assert_close(log_mel(samples * 2, 16_000, 40), features, atol=2e-2, rtol=0)
    assert torch.equal(log_mel(np.zeros(8_000, np.int16), 16_000, 40), torch.zeros(50, 40))  # silence


def test_channels_are_averaged_and_other_rates_resampled(tmp_path):
    left, right = tone(440, 0.5), tone(880, 0.5)
    stereo = read_sound(write_wave(tmp_path / "stereo.wav", [left, right]), 16_000)
    assert abs(stereo - (left / 2 + right / 2)).max() <= 0.5
    assert np.array_equal(read_sound(write_wave(tmp_path / "mono.wav", [left]), 16_000), left)
    faster = read_sound(write_wave(tmp_path / "44.wav", [tone(440, 0.5, 44_100)], 44_100), 16_000)
    assert len(faster) == 8_000
    assert abs(faster[500:-500].astype(int) - left[500:-500]).max() < 80  # 1 % of its loudness


def test_a_format_that_cannot_be_rewound_is_read(tmp_path):
    soundfile.write(tmp_path / "x.wav", tone(440, 0.5), 16_000, subtype="GSM610")
    found = read_sound(tmp_path / "x.wav", 16_000)[:8000]  # GSM pads the last of its blocks
    assert abs(found.astype(int) - tone(440, 0.5)).mean() < 500


@pytest.mark.parametrize(("name", "subtype"), [("x.ogg", "VORBIS"), ("x.opus", "OPUS")])
def test_what_is_too_loud_is_clipped(tmp_path, name, subtype):
    square = np.where(np.arange(16_000) // 40 % 2, 1.0, -1.0)  # the codecs go beyond it
    soundfile.write(tmp_path / name, square, 16_000, format="OGG", subtype=subtype)
    with soundfile.SoundFile(tmp_path / name) as file:
        exact = file.read(dtype="float64")
    assert abs(exact).max() > 1
    found = read_sound(tmp_path / name, 16_000)
    assert abs(found - np.clip(exact * 32768, -32768, 32767)).max() <= 1


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE", "PCM_24"])
def test_samples_of_other_types_are_rounded_to_16_bits(tmp_path, subtype):
    loud = np.array([0.25, -1.0, 1.0, 7.0, -7.0] * 100) / (8 if subtype == "PCM_24" else 1)
    soundfile.write(tmp_path / "x.wav", loud, 16_000, subtype=subtype)
    expected = np.clip(np.rint(loud * 32768), -32768, 32767)
    assert abs(read_sound(tmp_path / "x.wav", 16_000) - expected).max() <= 1  # libsndfile cuts 24 bits off
    soundfile.write(tmp_path / "nan.wav", np.full(500, np.nan), 16_000, subtype="FLOAT")
    assert not read_sound(tmp_path / "nan.wav", 16_000).any()


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("none.wav", None, r"none\.wav is not a file, but must be a sound"),
        ("text.wav", b"not a sound", r"text\.wav cannot be read as a sound: "),
        ("empty.wav", b"", r"empty\.wav cannot be read as a sound: "),
    ],
)
def test_what_is_no_sound_is_refused(name, written, message, tmp_path):
    if written is not None:
        (tmp_path / name).write_bytes(written)
    with pytest.raises(ValueError, match=message):
        read_sound(tmp_path / name, 16_000)


@pytest.mark.parametrize("n_mels", [2, 120])
def test_bands_that_do_not_suit_the_rate_are_named(n_mels):
    with pytest.raises(ValueError, match=f"n_mels is {n_mels}, which does not suit sound of 8000 Hz: "):
        log_mel(np.zeros(8_000, np.int16), 8_000, n_mels)


def test_a_sound_without_samples_is_refused(tmp_path):
    path = write_wave(tmp_path / "short.wav", [tone(440, 0.01)])
    with pytest.raises(
        ValueError, match=r"short\.wav has 160 samples at 16000 Hz, but must have at least 400"
    ):
        read_sound(path, 16_000)


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_the_shortest_sound_is_one_frame(rate, tmp_path):
    frame = tone(440, 0.025, rate)
    assert len(read_sound(write_wave(tmp_path / "frame.wav", [frame], rate), rate)) == rate // 40
    with pytest.raises(
        ValueError, match=f"has {rate // 40 - 1} samples at {rate} Hz, .* {rate // 40}: 25 ms"
    ):
        read_sound(write_wave(tmp_path / "less.wav", [frame[1:]], rate), rate)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(ImportError, match=r"needs the library soundfile: run pip install '\.\[speech\]'"):
        read_sound(tmp_path / "x.wav", 16_000)


def test_bars_are_hidden_within_utterances_only():
    batch = as_batch([Utterance(torch.ones(n, 20), torch.arange(3)) for n in (60, 25)])
    for seed in range(20):
        hidden = hide(batch, np.random.default_rng(seed), 2)
        assert torch.equal(hidden.targets, batch.targets)
        assert not hidden.inputs[1, 25:].any()
        for row, length in zip(hidden.inputs, (60, 25), strict=True):
            gone = row[:length] == 0
            assert gone.all(1).sum() <= 2 * WIDEST["frames"]
            assert gone.all(0).sum() <= 2 * WIDEST["bands"]
            assert torch.equal(gone, gone.all(1, keepdim=True) | gone.all(0, keepdim=True))
    assert torch.equal(hide(batch, np.random.default_rng(0), 0).inputs, batch.inputs)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_digits(tmp_path, monkeypatch)
    return write_an4(tmp_path, monkeypatch)


def test_an4_has_the_phones_of_its_dictionary(folder):
    dataset = data.load("an4", data_dir=folder, masks=0)
    (batch,) = dataset.eval_batches(5)
    said = [dataset.vocabulary.decode(row[row != IGNORED]) for row in batch.targets]
    assert said == [" ".join(PHONES[word] for word in line.split()) for line in LINES["test"]]
    expected = log_mel(spoken("ONE", an4.RATE), an4.RATE, 40)
    assert torch.equal(batch.inputs[1][~batch.key_padding_mask[1]], expected)
    assert dataset.vocab_size == len({phone for phones in PHONES.values() for phone in phones.split()})


def test_an4_has_letters_too(folder):
    dataset = data.load("an4", units="letters", data_dir=folder)
    (batch,) = dataset.eval_batches(5)
    assert [dataset.vocabulary.decode(row[row != IGNORED]) for row in batch.targets] == LINES["test"]
    assert dataset.vocabulary.counted == "word"


def test_training_has_every_utterance_once_an_epoch(folder):
    dataset = data.load("an4", data_dir=folder)
    seen = [
        dataset.vocabulary.decode(row[row != IGNORED])
        for step in range(an4.POOL)
        for row in dataset.batch("train", step=step, batch_size=3, seed=4).targets
    ]
    counts = {seen.count(" ".join(PHONES[word] for word in line.split())) for line in LINES["train"]}
    assert counts == {an4.POOL * 3 // len(LINES["train"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an4", "spoken_digits"])
def test_batches_are_pure_functions_of_seed_and_step(folder, name):
    dataset, other = (data.load(name, data_dir=folder) for _ in range(2))
    batch = dataset.batch("train", step=3, batch_size=4, seed=1)
    again = other.batch("train", step=3, batch_size=4, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(batch[:3], again[:3], strict=True))
    differs = dataset.batch("train", step=3, batch_size=4, seed=2)
    assert differs.inputs.shape != batch.inputs.shape or not torch.equal(differs.inputs, batch.inputs)
    assert batch.inputs.shape[2] == dataset.n_mels == 40
    assert batch.key_padding_mask.shape == batch.inputs.shape[:2]
    assert not batch.inputs[batch.key_padding_mask].any()


def test_digits_are_joined_of_recordings_of_the_split(folder):
    dataset = data.load("spoken_digits", data_dir=folder, most=3, val_size=20)
    batches = list(dataset.eval_batches(8))
    assert [len(batch.targets) for batch in batches] == [8, 8, 4]
    counts = {int((row != IGNORED).sum()) for batch in batches for row in batch.targets}
    assert counts == {1, 2, 3}
    for batch in batches:
        for row, padding, ids in zip(batch.inputs, batch.key_padding_mask, batch.targets, strict=True):
            word = spoken_digits.WORDS[int(ids[0])]
            takes = [spoken(word, 8_000) // (take + 1) for take in range(5)]
            if ids.numel() == 1 or ids[1] == IGNORED:
                found = [torch.equal(row[~padding], log_mel(take, 8_000, 40)) for take in takes]
                assert any(found)
            assert int((~padding).sum()) >= len(takes[0]) // 80
    assert dataset.vocabulary.decode(torch.tensor([4, 2])) == "four two"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"an4/etc/an4_test.transcription": b"ONE (test0)\nONE (test1)"}, "its 8 utterances have the sha256"),
        ({"an4/wav/an4train_clstk/me/train1.flac": None}, "it lacks the recording an4train_clstk/me/train1"),
        ({"an4/etc/an4.dic": b""}, "its 8 utterances have the sha256"),
    ],
    ids=["transcript", "recording", "dictionary"],
)
def test_another_an4_is_refused(folder, changes, message):
    files = {name: x for name, x in (an4_files() | changes).items() if x is not None}
    (folder / "an4/an4_flac.tar").write_bytes(tar(files, "w"))
    with pytest.raises(ValueError, match=f"an4_flac.tar is corrupt: {message}"):
        data.load("an4", data_dir=folder)


def test_other_recordings_of_digits_are_refused(folder, monkeypatch):
    monkeypatch.setattr(spoken_digits, "SHA256", "0")
    with pytest.raises(ValueError, match=r"is corrupt: its 140 recordings have the sha256 \w+, not 0"):
        data.load("spoken_digits", data_dir=folder)


def test_options_are_checked_before_an_archive_is_read(tmp_path):
    with pytest.raises(ValueError, match="most is 0, but must be an integer of at least 1"):
        data.load("spoken_digits", data_dir=tmp_path, most=0)


def test_a_vocabulary_of_speech_is_whole(tmp_path):
    speech = {"units": ["a", "b"], "rate": 8_000, "n_mels": 8, "counted": "word"}
    vocabulary = Vocabulary("speech", **speech)
    assert vocabulary.features(write_wave(tmp_path / "x.wav", [tone(300, 0.2)])).shape == (20, 8)
    vocabulary.check(2)
    with pytest.raises(ValueError, match="has 2 ids, but the model has 3"):
        vocabulary.check(3)
    assert vocabulary.decode([1, 0]) == vocabulary.decode(torch.tensor([1, 0])) == "b a"
    for ids in ([-1], [2]):
        with pytest.raises(ValueError, match=r"ids reach from .* but must be from 0 to 1"):
            vocabulary.decode(ids)
    for name in speech:
        with pytest.raises(ValueError, match=f"{name} is None, but must be given with kind 'speech'"):
            Vocabulary("speech", **speech | {name: None})
    with pytest.raises(ValueError, match="kind is 'ids', but must be 'speech' to read sounds"):
        Vocabulary("ids").features(tmp_path / "x.wav")


@pytest.mark.parametrize("real_data", ["an4"], indirect=True)
def test_the_real_an4(real_data):
    dataset = data.load("an4", data_dir=real_data)
    assert (dataset.epoch_size("train"), dataset.epoch_size("val"), dataset.vocab_size) == (948, 130, 33)


@pytest.mark.parametrize("real_data", ["fsdd"], indirect=True)
def test_the_real_digits(real_data):
    batch = data.load("spoken_digits", data_dir=real_data, val_size=2).batch(
        "train", step=0, batch_size=2, seed=0
    )
    assert batch.inputs.shape[0] == 2


def test_three_channels_are_averaged_and_rounded(tmp_path):
    one, none = np.ones(800, np.int16), np.zeros(800, np.int16)
    assert (read_sound(write_wave(tmp_path / "x.wav", [one, one, none]), 16_000) == 1).all()
    assert (read_sound(write_wave(tmp_path / "x.wav", [none, one, none]), 16_000) == 0).all()


def test_bars_reach_every_frame_and_band_and_do_not_depend_on_other_utterances():
    short, long = (Utterance(torch.ones(n, 20), torch.arange(3)) for n in (25, 60))
    alone, beside = as_batch([short]), as_batch([short, long])
    times, bands = torch.zeros(25, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    for seed in range(300):
        hidden = hide(alone, np.random.default_rng(seed), 2).inputs[0]
        assert torch.equal(hidden, hide(beside, np.random.default_rng(seed), 2).inputs[0, :25])
        times |= (hidden == 0).all(1)
        bands |= (hidden == 0).all(0)
    assert times.all()
    assert bands.all()


def test_bars_are_drawn_by_the_seed_and_the_step(folder, monkeypatch):
    draws = []
    monkeypatch.setattr(an4, "hide", lambda batch, rng, masks: draws.append(rng.random()) or batch)
    dataset = data.load("an4", data_dir=folder)
    for step, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        dataset.batch("train", step=step, batch_size=2, seed=seed)
    assert len(set(draws)) == 3
    assert draws[0] == draws[3]


def test_digits_are_trained_on_other_recordings_than_they_are_tested_on(folder):
    dataset = data.load("spoken_digits", data_dir=folder, most=1, masks=0, val_size=1)
    batch = dataset.batch("train", step=0, batch_size=60, seed=0)
    for row, padding, ids in zip(batch.inputs, batch.key_padding_mask, batch.targets, strict=True):
        word = spoken(spoken_digits.WORDS[int(ids[0])], 8_000)
        takes = [log_mel(word // (take + 1), 8_000, 40) for take in (5, 6)]
        assert any(torch.equal(row[~padding], take) for take in takes)
