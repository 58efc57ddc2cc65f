"""Models of speech on the page: they write down what PyTorch does, of a file and of the microphone."""

import json
import time

import numpy as np
import pytest
import torch
from browser import WIDTHS, assert_fits_and_is_accessible, chromium, opened, resize, served, state, wait_for
from selenium.webdriver import Keys
from sounds import tone, write_wave
from transcribers import N_MELS, RATE, VOCABULARY, make_lstm, make_mixed, sound

from unrolled.generation import transcribe
from unrolled.interop.onnx.front_end import FULL_SCALE, LogMel
from unrolled.interop.web import write_site

GROUP, HERTZ = "Speech", 1_000


@pytest.fixture(scope="module")
def speakers():
    """Models of speech by name."""
    return {"mixed": make_mixed(), "lstm": make_lstm()}


@pytest.fixture(scope="module")
def page(speakers, models, tmp_path_factory):
    """The address of a page of these and of a model of text."""
    runs = {"text-linear": models["text-linear"][1]}
    for name, model in speakers.items():
        runs[name] = tmp_path_factory.mktemp(name)
        VOCABULARY.attach(model).save(runs[name])
    with served(write_site(runs, tmp_path_factory.mktemp("served") / "page")) as found:
        yield found


@pytest.fixture(scope="module")
def _listening(tmp_path_factory):
    file = write_wave(tmp_path_factory.mktemp("sounds") / "tone.wav", [tone(HERTZ, 20, 48_000)], 48_000)
    flags = ("ui-for-media-stream", "device-for-media-stream")
    with chromium(*(f"--use-fake-{x}" for x in flags), f"--use-file-for-fake-audio-capture={file}") as driver:
        yield driver


@pytest.fixture
def browser(_listening, page):
    """A browser whose microphone hears a tone, on the page."""
    resize(_listening, "desktop")
    for kind in ("browser", "performance"):
        _listening.get_log(kind)
    return opened(_listening, page, GROUP)


def said(browser):
    """Wait until the models are done; give what they made by name, and the samples that they read."""
    wait_for(
        browser,
        lambda _: state(browser) == "ready" and browser.execute_script("return window.unrolled.sound"),
    )
    runs, samples = browser.execute_script("return [window.unrolled.runs, Array.from(window.unrolled.sound)]")
    return runs, np.array(samples, np.float32)


def check(speakers, runs, samples):
    """Compare with PyTorch on the same samples."""
    features = LogMel(RATE, N_MELS)(torch.from_numpy(samples).unsqueeze(0))[0]
    assert set(runs) == set(speakers)
    for name, model in speakers.items():
        (ids,) = transcribe(model, [features])
        assert runs[name] == {"ids": ids.tolist(), "text": VOCABULARY.decode(ids)}


def choose(browser, path):
    browser.find_element("id", "sound").send_keys(str(path))


def press(browser):
    browser.find_element("id", "record").click()


def listening(browser):
    wait_for(browser, lambda _: "Listening" in browser.find_element("id", "speech-status").text)


def test_a_file_is_written_down_as_by_pytorch(browser, speakers, tmp_path):
    expected = sound(16_000, 3)
    choose(browser, write_wave(tmp_path / "a.wav", [expected], RATE))
    runs, samples = said(browser)
    assert samples.shape == expected.shape
    assert abs(samples * FULL_SCALE - expected).max() < 1.01  # Chromium divides by 32,767 above 0
    assert len(runs["mixed"]["ids"]) > 5
    check(speakers, runs, samples)
    texts = [element.text for element in browser.find_elements("css selector", ".said")]
    assert texts == [runs[name]["text"] for name in speakers]
    assert browser.find_element("id", "speech-status").text == "Done: 2.0 seconds of sound."
    for part in ("bench", "cost", "inside"):
        assert not browser.find_element("id", part).is_displayed()


def test_channels_are_averaged_and_other_rates_resampled(browser, tmp_path):
    left = tone(HERTZ, 0.5, 44_100)
    choose(browser, write_wave(tmp_path / "stereo.wav", [left, 0 * left], 44_100))
    _, samples = said(browser)
    expected = tone(HERTZ, 0.5, RATE) / 2 / FULL_SCALE
    assert abs(len(samples) - len(expected)) <= 1
    assert abs(samples[200:3_800] - expected[200:3_800]).max() < 0.02 * expected.max()


def test_what_the_microphone_hears_is_written_down(browser, speakers):
    press(browser)
    listening(browser)
    assert browser.find_element("id", "record").text == "Stop"
    assert not browser.find_element("id", "sound").is_enabled()
    time.sleep(0.7)
    browser.switch_to.active_element.send_keys(Keys.ENTER)  # the button has kept the focus
    runs, samples = said(browser)
    check(speakers, runs, samples)
    assert 0.5 < len(samples) / RATE < 5
    heard = samples[-RATE // 4 :]  # the device begins with silence
    loudest = abs(np.fft.rfft(heard * np.hanning(len(heard)))).argmax() * RATE / len(heard)
    assert abs(loudest - HERTZ) < 10
    assert browser.find_element("id", "record").text == "Record"


def test_a_recording_ends_by_itself(browser):
    browser.execute_script("const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 20)")
    press(browser)
    _, samples = said(browser)
    assert len(samples) < 3 * RATE  # half a second, and what starting takes


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("text.wav", b"no sound", "text.wav cannot be read as a sound."),
        ("short.wav", tone(440, 0.02, RATE), "The sound has 160 samples, but must have at least 200."),
        ("long.wav", tone(440, 60.02, RATE), "The sound has 60.1 seconds, but must have at most 60."),
    ],
)
def test_what_cannot_be_read_is_named(browser, tmp_path, name, written, message):
    path = tmp_path / name
    if isinstance(written, bytes):
        path.write_bytes(written)
    else:
        write_wave(path, [written], RATE)
    choose(browser, path)
    wait_for(browser, lambda _: browser.find_element("id", "speech-fault").text)
    assert browser.find_element("id", "speech-fault").text == message
    wait_for(browser, lambda _: state(browser) == "ready")
    choose(browser, write_wave(tmp_path / "good.wav", [sound(4_000)], RATE))  # the page goes on
    assert said(browser)[0]
    assert browser.find_element("id", "speech-fault").text == ""


def test_an_error_is_gone_once_things_work_again(browser, tmp_path):
    good = write_wave(tmp_path / "good.wav", [sound(4_000)], RATE)
    fault, failure = (browser.find_element("id", name) for name in ("speech-fault", "failure"))
    browser.execute_script(
        "const kept = File.prototype.arrayBuffer; File.prototype.arrayBuffer = function () {"
        "  File.prototype.arrayBuffer = kept; return Promise.reject(new Error('it is gone.')); }"
    )
    choose(browser, good)
    wait_for(browser, lambda _: fault.text == "good.wav cannot be read: it is gone.")
    browser.execute_script(
        "const { Transcriber } = await import(new URL('transcriber.js', location));"
        "const kept = Transcriber.prototype.transcribe; Transcriber.prototype.transcribe = function () {"
        "  Transcriber.prototype.transcribe = kept; throw new Error('no memory'); }"
    )
    choose(browser, good)
    wait_for(browser, lambda _: failure.text == "Something went wrong: no memory")
    choose(browser, good)
    assert said(browser)[0]
    assert (fault.text, failure.text) == ("", "")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('Permission denied'))",
            "The microphone cannot be used: Permission denied.",
        ),
        (
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined })",
            "A browser gives a page the microphone only if it comes by https or from this device.",
        ),
        (
            "AudioWorklet.prototype.addModule = () => Promise.reject(new Error('Unable to load'))",
            "recorder.js could not be fetched, so nothing can be recorded.",
        ),
    ],
    ids=["denied", "insecure", "offline"],
)
def test_a_microphone_that_cannot_be_used_is_named(browser, before, message):
    browser.execute_script(before)
    press(browser)
    wait_for(browser, lambda _: browser.find_element("id", "speech-fault").text)
    assert browser.find_element("id", "speech-fault").text == message
    assert browser.find_element("id", "record").text == "Record"


def test_a_recording_may_be_stopped_before_it_begins(browser):
    browser.execute_script(
        "const devices = navigator.mediaDevices; const ask = devices.getUserMedia.bind(devices);"
        "devices.getUserMedia = (x) => new Promise((resolve) => (window.allow = () => resolve(window.stream = ask(x))))"
    )
    status = browser.find_element("id", "speech-status")
    press(browser)
    wait_for(browser, lambda _: status.text == "Waiting for the microphone.")
    press(browser)
    wait_for(browser, lambda _: status.text == "Stopped.")
    assert browser.find_element("id", "record").text == "Record"
    assert state(browser) == "ready"
    browser.execute_script("window.allow()")
    ended = "window.stream?.then((stream) => arguments[0](stream.getTracks().map((x) => x.readyState)))"
    wait_for(browser, lambda _: browser.execute_async_script(ended) == ["ended"])
    assert status.text == "Stopped."


def test_a_recording_may_be_stopped_while_its_module_is_fetched(browser):
    browser.execute_script(
        "const { addModule } = AudioWorklet.prototype; AudioWorklet.prototype.addModule = async function (url) {"
        " await new Promise((resolve) => (window.go = resolve)); return addModule.call(this, url); }"
    )
    press(browser)
    wait_for(browser, lambda _: browser.execute_script("return Boolean(window.go)"))
    press(browser)
    browser.execute_script("window.go()")
    wait_for(browser, lambda _: state(browser) == "ready")
    assert browser.find_element("id", "speech-status").text == "Stopped."
    assert browser.find_element("id", "speech-fault").text == ""


def test_another_group_ends_a_recording(browser):
    press(browser)
    listening(browser)
    browser.find_element("css selector", "input[value='verse']").click()
    record = browser.find_element("id", "record")
    wait_for(browser, lambda _: record.get_attribute("textContent") == "Record")
    assert record.get_attribute("aria-disabled") == "true"  # also while the other models are loading
    wait_for(
        browser, lambda _: state(browser) == "ready" and browser.find_element("id", "bench").is_displayed()
    )
    assert not browser.find_element("id", "speech").is_displayed()
    browser.find_element("css selector", f"input[value='{GROUP}']").click()
    wait_for(browser, lambda _: browser.find_element("id", "speech").is_displayed())
    assert browser.find_element("id", "record").text == "Record"
    assert browser.find_element("id", "record").get_attribute("aria-disabled") == "false"
    assert browser.execute_script("return window.unrolled") == {"runs": {}}


def test_no_request_leaves_the_host_and_the_policy_is_never_broken(browser, page):
    press(browser)
    listening(browser)
    press(browser)
    wait_for(browser, lambda _: state(browser) == "ready")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("mixed/plain.onnx") for url in asked)
    assert [url for url in asked if not url.startswith(page)] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_is_accessible(browser, axe, width, tmp_path):
    resize(browser, width)
    choose(browser, write_wave(tmp_path / "a.wav", [sound(16_000)], RATE))
    said(browser)
    assert_fits_and_is_accessible(browser, axe, width)
