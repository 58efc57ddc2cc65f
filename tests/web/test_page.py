"""The page in a real browser: it makes what PyTorch makes, asks nobody else, and is usable by everybody."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from browser import (
    CHARACTERS,
    IDS,
    IMAGE,
    TEXT,
    WIDTHS,
    assert_fits_and_is_accessible,
    greedy,
    opened,
    resize,
    run,
    served,
    set_value,
    state,
    wait_for,
)
from selenium.webdriver import ActionChains, Keys

from unrolled.data import Vocabulary
from unrolled.interop.web import write_site
from unrolled.models import Decoder, DecoderConfig, RecurrentLM, RecurrentLMConfig
from unrolled.ops.state import nbytes


def test_text_of_200_tokens_is_what_pytorch_writes(browser, address, models):
    opened(browser, address, TEXT)
    set_value(browser, "prompt", "Kéy")
    set_value(browser, "count", "200")
    set_value(browser, "temperature", "0")
    made = run(browser)
    assert set(made) == {"text-linear", "text-softmax"}
    for name, result in made.items():
        expected = greedy(models[name][0], result["prompt"], 200)
        assert len(result["prompt"]) == 3
        assert len(set(expected)) > 8  # the model does not repeat itself, so that equality says something
        assert result["ids"] == expected
    shown = browser.find_element("css selector", ".model.linear .made").text
    assert shown.startswith("Kéy")
    assert "Done after 200 characters" in browser.find_element("id", "status").text


def test_a_model_writes_up_to_the_end_of_its_document(browser, address, models):
    opened(browser, address)
    prompt = [CHARACTERS.index(character) for character in "Kéy"]
    expected = {name: greedy(models[name][0], prompt, 60) for name in ("text-linear", "text-softmax")}
    end = next(x for x in expected["text-linear"][5:] if x not in expected["text-softmax"])
    browser.execute_script(
        "const { Engine } = await import(new URL('engine.js', location)); const load = Engine.load;"
        "Engine.load = async function (...given) {"
        f"  const engine = await load.apply(this, given); engine.vocabulary.end = {end}; return engine; }};"
    )
    browser.find_element("css selector", f"input[value='{TEXT}']").click()
    wait_for(browser, lambda _: state(browser) == "ready")
    set_value(browser, "prompt", "Kéy")
    set_value(browser, "count", "60")
    set_value(browser, "temperature", "0")
    made = run(browser)
    length = expected["text-linear"].index(end) + 1
    assert made["text-linear"]["ids"] == expected["text-linear"][:length]
    assert made["text-softmax"]["ids"] == expected["text-softmax"]
    assert browser.find_element("id", "status").text == f"Done after {length} and 60 characters."


def test_the_limits_are_those_of_every_model(browser, address):
    opened(browser, address, IDS)
    set_value(browser, "prompt", "")
    assert "a model here needs a prompt" in browser.find_element("id", "prompt-fault").text
    set_value(browser, "prompt", "1 " * 17)
    assert "a model here has at most 16 positions." in browser.find_element("id", "prompt-fault").text
    set_value(browser, "prompt", "1 2 3")
    made = run(browser)
    assert [len(result["ids"]) for result in made.values()] == [14] * 3
    assert "A model here has at most 16 positions, and all" in browser.find_element("id", "status").text


def test_an_image_drawn_by_pointer_is_completed_as_pytorch_completes_it(browser, address, models):
    opened(browser, address)
    browser.find_element("id", "clear").click()
    assert browser.execute_script("return document.getElementById('rows').value") == "5"
    pad = browser.find_element("id", "pad")
    ActionChains(browser).move_to_element_with_offset(pad, -60, -80).click_and_hold().move_by_offset(
        100, 30
    ).release().perform()
    set_value(browser, "temperature", "0")
    result = run(browser)["image-linear"]
    assert len(result["prompt"]) == 40
    assert max(result["prompt"]) == 16
    assert len(result["ids"]) == 24
    assert len(set(result["ids"])) > 2
    assert result["ids"] == greedy(models["image-linear"][0], result["prompt"], 24)


def test_an_image_can_be_drawn_by_keyboard_alone(browser, address):
    opened(browser, address)
    browser.find_element("id", "clear").send_keys(Keys.ENTER)
    pad = browser.find_element("id", "pad")
    pad.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, " ")
    pad.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    wait_for(browser, lambda _: browser.find_element("id", "pad-said").get_attribute("textContent"))
    assert browser.find_element("id", "pad-said").get_attribute("textContent") == "Row 3, column 6, painted"
    browser.find_element("id", "run").send_keys(Keys.ENTER)
    wait_for(browser, lambda _: browser.execute_script("return window.unrolled.runs['image-linear']"))
    prompt = browser.execute_script("return window.unrolled.runs['image-linear'].prompt")
    assert prompt[16:24].count(16) == 4


def test_the_linear_state_keeps_its_size_and_the_softmax_cache_grows(browser, address, models):
    opened(browser, address, TEXT)
    sizes = {}
    for count in (5, 50):
        set_value(browser, "count", str(count))
        sizes[count] = {name: result["bytes"] for name, result in run(browser).items()}
    kept = models["text-linear"][0].init_state(1)
    repeated = 2 * 8  # each layer counts positions for itself, and the page's graph once for all
    assert sizes[5]["text-linear"] == sizes[50]["text-linear"] == nbytes(kept) - repeated
    per_token = 2 * 2 * 32 * 4  # keys and values of two layers
    assert sizes[50]["text-softmax"] - sizes[5]["text-softmax"] == 45 * per_token
    words = [element.text for element in browser.find_elements("css selector", ".growth")]
    assert words == ["constant", "growing"]


@pytest.mark.parametrize("width", WIDTHS)
def test_one_model_fills_the_row(browser, page_of, width):
    resize(browser, width)
    opened(browser, page_of("text-linear"))
    run(browser)
    wide = "return document.querySelector(arguments[0]).getBoundingClientRect().width"
    for inner, outer in ((".model", "#models"), ("#memories figure", "#memories")):
        assert browser.execute_script(wide, inner) == browser.execute_script(wide, outer)


@pytest.mark.parametrize(
    ("names", "title", "said", "unsaid"),
    [
        (["text-linear"], "A transformer that runs as an RNN", ["Linear", "never grows"], ["Softmax"]),
        (
            ["text-softmax"],
            "A transformer, one token at a time",
            ["Softmax", "keeps more"],
            ["Linear", "never"],
        ),
        (
            ["text-linear", "text-softmax"],
            "A transformer that runs as an RNN",
            ["Linear", "Softmax", "keeps more"],
            [],
        ),
    ],
)
def test_the_introduction_says_what_the_page_holds(browser, page_of, names, title, said, unsaid):
    opened(browser, page_of(*names))
    assert browser.find_element("css selector", "h1").text == title
    assert browser.title == f"unrolled: a{title[1:]}"
    text = browser.find_element("id", "introduction").text
    assert [word for word in said if word not in text] == []
    assert [word for word in unsaid if word in text] == []


def test_the_time_per_token_is_a_median_without_the_warm_up(browser, address):
    """Steps are made to take 1 s while they warm up, then 10 ms, with two slow ones among 32."""
    opened(browser, address, TEXT)
    browser.execute_script(
        "const module = await import(new URL('engine.js', location));"
        "const call = module.Engine.prototype.call; const counts = new Map();"
        "module.Engine.prototype.call = async function (...given) {"
        "  const n = (counts.get(this) ?? 0) + 1; counts.set(this, n);"
        "  return { ...await call.apply(this, given), ms: n <= 9 ? 1000 : n === 20 || n === 42 ? 700 : 10 }; };"
    )
    set_value(browser, "prompt", "n")
    set_value(browser, "count", "42")
    run(browser)
    assert [element.text for element in browser.find_elements("css selector", ".time")] == ["10 ms"] * 2
    chart = browser.find_element("css selector", "#charts figure:last-child svg").get_attribute("aria-label")
    assert chart == "Time per token over the tokens read: Linear attention 10 ms, Softmax attention 10 ms."
    set_value(browser, "count", "9")  # the prompt, and eight steps that warm up
    run(browser)
    assert [element.text for element in browser.find_elements("css selector", ".time")] == ["–"] * 2


def test_the_time_per_token_is_right_on_a_clock_of_whole_milliseconds(browser, address):
    """Steps are made to take 0.137 ms."""
    opened(browser, address, TEXT)
    browser.execute_script(
        "const { Engine } = await import(new URL('engine.js', location)); const call = Engine.prototype.call;"
        "let ms = 0; performance.now = () => Math.floor(ms);"
        "Engine.prototype.call = function (...given) {"
        "  const end = call.apply(this, given); ms += 0.137; return end; };"  # between two looks at the clock
    )
    set_value(browser, "count", "600")
    run(browser)
    times = [element.text for element in browser.find_elements("css selector", ".time")]
    assert all(0.12 < float(time.removesuffix(" ms")) < 0.16 for time in times)
    lines = browser.find_elements("css selector", "#charts figure:last-child polyline")
    heights = [float(point.split(",")[1]) for line in lines for point in line.get_attribute("points").split()]
    assert len(heights) >= 6
    assert max(heights) < 60  # the axis is at 186


def test_the_seed_decides_what_is_drawn(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "count", "40")
    set_value(browser, "temperature", "1.5")
    first = run(browser)
    assert run(browser) == first
    set_value(browser, "seed", "2")
    assert run(browser) != first


def test_a_run_can_be_stopped(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "prompt", "n\n" * 60)
    set_value(browser, "count", "20000")
    box = browser.find_element("css selector", ".made p")
    assert int(box.get_property("scrollTop")) > 0
    browser.find_element("id", "run").click()
    browser.execute_script("arguments[0].scrollTop = 0", box)  # to read what is above
    wait_for(browser, lambda _: "–" not in browser.find_element("css selector", ".time").text)
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: state(browser) == "ready")
    assert browser.find_element("id", "status").text.startswith("Stopped after")
    assert box.get_property("scrollTop") == 0


def test_a_run_that_reads_a_long_prompt_can_be_stopped(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "prompt", "n" * 20_000)
    browser.execute_script(
        "const { Engine } = await import(new URL('engine.js', location)); const call = Engine.prototype.call;"
        "window.calls = 0; Engine.prototype.call = function (...given) {"
        "  if (++window.calls === 3) document.getElementById('run').click();"
        "  return call.apply(this, given); };"
    )
    run(browser)
    assert browser.execute_script("return window.calls") == 3
    assert browser.find_element("id", "status").text == "Stopped after 0 characters."


def test_a_prompt_may_change_during_a_run(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "prompt", "the")
    set_value(browser, "count", "20000")
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: "–" not in browser.find_element("css selector", ".time").text)
    set_value(browser, "prompt", "")
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: state(browser) == "ready")
    assert browser.find_element("css selector", ".given").text == "the"
    assert not browser.find_element("id", "run").is_enabled()
    assert "Type a few characters" in browser.find_element("id", "prompt-fault").text
    assert not browser.find_element("id", "failure").is_displayed()


def test_a_group_that_needs_a_row_gets_one(browser, models, tmp_path):
    torch.manual_seed(0)
    Decoder(DecoderConfig(9, d_model=16, n_layers=1, n_heads=2, max_length=64)).save(tmp_path / "other")
    (tmp_path / "other" / "vocabulary.json").write_text('{"kind": "image", "shape": [8, 8]}')
    runs = {"image-linear": models["image-linear"][1], "other": tmp_path / "other"}
    with served(write_site(runs, tmp_path / "served" / "page")) as address:
        opened(browser, address)
        set_value(browser, "rows", "0")
        assert len(run(browser)["image-linear"]["ids"]) == 64
        browser.find_elements("css selector", "#groups input")[1].click()
        wait_for(browser, lambda _: state(browser) == "ready")
        assert browser.find_element("id", "rows-shown").text == "1 of 8"
        made = run(browser)["other"]
        assert (len(made["prompt"]), len(made["ids"])) == (8, 56)


def test_a_double_click_begins_a_run_and_does_not_stop_it(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "count", "400")
    ActionChains(browser).double_click(browser.find_element("id", "run")).perform()
    wait_for(browser, lambda _: browser.find_element("id", "status").text == "Done after 400 characters.")
    set_value(browser, "count", "1")
    run(browser)
    assert browser.find_element("id", "status").text == "Done after 1 character."


def test_the_rows_shown_are_those_of_the_slider(browser, address):
    opened(browser, address)
    browser.execute_script(
        "const { Engine } = await import(new URL('engine.js', location));"
        "Engine.prototype.call = () => new Promise(() => {})"  # a run without end
    )
    browser.find_element("id", "run").click()
    set_value(browser, "rows", "2")
    assert browser.find_element("id", "rows-shown").text == "2 of 8"


def test_the_temperature_of_the_export_is_the_default(browser, models, tmp_path):
    for temperature, shown in {"2": "2", "0.83": "0.85"}.items():  # in steps of 0.05
        out = tmp_path / temperature / "page"
        write_site(
            {"text-linear": models["text-linear"][1]}, out, sampling={"temperature": float(temperature)}
        )
        with served(out) as address:
            opened(browser, address)
            assert browser.find_element("id", "temperature").get_attribute("value") == shown
            assert browser.find_element("css selector", "label:has(#count)").text.startswith("Characters to")


def test_the_temperature_moves_in_steps_by_keyboard(browser, address):
    opened(browser, address, TEXT)
    slider, shown = browser.find_element("id", "temperature"), browser.find_element("id", "temperature-shown")
    slider.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 16)
    assert (slider.get_property("value"), shown.text) == ("0.8", "0.80")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 4)
    assert (slider.get_property("value"), shown.text) == ("1", "1.00")


def test_a_run_ends_with_the_group_that_it_was_begun_with(browser, address):
    opened(browser, address, TEXT)
    browser.execute_script(
        "const wait = setTimeout; window.requestAnimationFrame = () => 0;"
        "window.setTimeout = (then) => wait(then, 1500)"  # the run is slow to notice that it is to stop
    )
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: "–" not in browser.find_element("css selector", ".time").text)
    browser.find_element("css selector", f"input[value='{IMAGE}']").click()
    wait_for(browser, lambda _: browser.execute_script("return Object.keys(window.unrolled.runs).length"))
    wait_for(browser, lambda _: state(browser) == "ready")
    assert set(browser.execute_script("return window.unrolled.runs")) == {"text-linear", "text-softmax"}
    assert browser.find_element("id", "run").text == "Complete it"
    assert browser.find_element("id", "status").text == ""


def test_no_slip_of_the_hand_fills_the_memory(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "count", "1000000000")
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: "–" not in browser.find_element("css selector", ".time").text)
    widths = "return Array.from(document.querySelectorAll('.heads canvas'), (canvas) => canvas.width)"
    assert max(browser.execute_script(widths)) <= 2048
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: state(browser) == "ready")
    assert browser.find_element("id", "status").text.startswith("Stopped after")
    set_value(browser, "prompt", "n" * 20001)
    assert "20001 characters, where this page reads 20000" in browser.find_element("id", "prompt-fault").text


def test_a_prompt_that_the_model_cannot_read_is_refused(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "prompt", "naïve")
    assert browser.find_element("id", "prompt-fault").text == "The model never saw the character “ï”."
    for character, code in {"\t": "(U+0009).", "\u0301": "(U+0301)."}.items():
        set_value(browser, "prompt", f"n{character}")
        assert browser.find_element("id", "prompt-fault").text.endswith(code)
    assert not browser.find_element("id", "run").is_enabled()
    set_value(browser, "prompt", "")
    assert "Type a few characters" in browser.find_element("id", "prompt-fault").text
    set_value(browser, "prompt", "n")
    assert browser.find_element("id", "run").is_enabled()


def test_a_number_that_cannot_be_used_is_refused(browser, address):
    opened(browser, address, TEXT)
    refused = {"count": ["", "-5", "2.7"], "seed": ["", "-1", "4294967296"]}
    for field, label in {"count": "Characters to write: ", "seed": "Seed: "}.items():
        for value in refused[field]:
            set_value(browser, field, value)
            assert browser.find_element("id", f"{field}-fault").text.startswith(label)
            assert not browser.find_element("id", "run").is_enabled()
            set_value(browser, field, "3")
            assert browser.find_element("id", f"{field}-fault").text == ""
            assert browser.find_element("id", "run").is_enabled()


def test_models_and_their_layers_are_told_apart(browser, address):
    opened(browser, address, IDS)
    set_value(browser, "count", "5")
    run(browser)
    lines = browser.execute_script(
        "const style = (line) => { const { stroke, strokeDasharray } = getComputedStyle(line);"
        "  return stroke + strokeDasharray; };"
        "return Array.from(document.querySelectorAll('#charts figure:first-child polyline'), style)"
    )
    assert len(set(lines)) == 3
    layers = browser.find_elements("css selector", "#layer option")
    assert [layer.text for layer in layers] == ["1", "2", "3"]
    shown = []
    for layer in layers:
        layer.click()
        captions = browser.find_elements("css selector", "#memories figcaption")
        shown.append(["φ(q)" in caption.text for caption in captions])
    assert shown == [[True, True, True], [True, True, False], [False, False, True]]


def test_a_cell_without_matrices_shows_no_layers(browser, tmp_path):
    gru = RecurrentLM(RecurrentLMConfig(32, d_model=8, n_layers=1, cell="gru"))
    Vocabulary("ids").attach(gru).save(tmp_path / "gru")
    with served(write_site({"gru": tmp_path / "gru"}, tmp_path / "served" / "page")) as address:
        opened(browser, address)
        assert run(browser)["gru"]["ids"]
        assert not browser.find_element("id", "inside").is_displayed()


def test_pictures_show_the_state(browser, address):
    opened(browser, address, TEXT)

    def colours(selector):
        return browser.execute_script(
            "const canvas = document.querySelector(arguments[0]);"
            "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "return new Set(new Uint32Array(data.buffer)).size",
            selector,
        )

    assert colours(".heads.state canvas") <= 2  # nothing read: zero, and the gap between the parts
    set_value(browser, "count", "30")
    run(browser)
    assert colours(".heads.state canvas") > 100
    assert colours(".heads.cache canvas") > 100
    before = browser.find_element("css selector", ".heads.state canvas").screenshot_as_base64
    browser.find_element("css selector", "#layer option[value='1']").click()
    assert browser.find_element("css selector", ".heads.state canvas").screenshot_as_base64 != before


def test_no_request_leaves_the_host_and_the_policy_is_never_broken(browser, address):
    opened(browser, address)
    run(browser)
    opened(browser, address, TEXT)
    run(browser)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("ort-wasm-simd-threaded.wasm") for url in asked)
    assert [url for url in asked if not url.startswith(address)] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_the_policy_forbids_other_hosts(browser, address):
    opened(browser, address)
    other = address.replace("127.0.0.1", "localhost")
    refused = browser.execute_async_script(
        "fetch(arguments[0]).then(() => arguments[1]('answered'), (error) => arguments[1](error.name))", other
    )
    assert refused == "TypeError"
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", [IMAGE, TEXT, IDS])
def test_it_fits_and_is_accessible(browser, address, axe, group, width, theme, tmp_path):
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    resize(browser, width)
    opened(browser, address, group)
    if group == TEXT:
        set_value(browser, "count", "60")
    run(browser)
    (tmp_path / f"{width}-{theme}.png").write_bytes(browser.get_screenshot_as_png())
    assert_fits_and_is_accessible(browser, axe, width)


def test_long_names_fit_a_phone(browser, site, tmp_path):
    page = tmp_path / "served" / "page"
    shutil.copytree(site, page)
    entries = json.loads((page / "models.json").read_text())
    for i, entry in enumerate(entries):
        entry["group"] = f"{entry['group']} of the-complete-works-of-william-shakespeare-1623.txt"
        entry["title"] = f"Linear attention: my_softmax_run_of_november_with_a_long_name_{i}"
    (page / "models.json").write_text(json.dumps(entries))
    resize(browser, "phone")
    with served(page) as address:
        opened(browser, address)
        for choice in browser.find_elements("css selector", "#groups input"):
            browser.execute_script("arguments[0].click()", choice)
            wait_for(browser, lambda _: state(browser) == "ready")
            run(browser)
            across = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert across == [360, 360]


def test_groups_and_colours_are_told_apart_in_forced_colours(browser, address):
    features = [{"name": "forced-colors", "value": "active"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened(browser, address)
    style = "Array.from(document.querySelectorAll('#groups label'), (label) => getComputedStyle(label).outlineStyle)"
    assert browser.execute_script(f"return {style}") == ["solid", "none", "none"]
    colours = "Array.from(document.querySelectorAll('.swatch'), (x) => getComputedStyle(x).backgroundColor)"
    assert len(set(browser.execute_script(f"return {colours}"))) == 3
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_order_of_focus_follows_the_page(browser, address):
    opened(browser, address)
    body = browser.find_element("css selector", "body")
    seen = []
    for _ in range(14):
        (body if not seen else browser.switch_to.active_element).send_keys(Keys.TAB)
        element = browser.switch_to.active_element
        seen.append(element.get_attribute("id") or element.tag_name)
    expected = ["pad", "clear", "rows", "summary", "temperature", "seed", "run", "layer"]
    assert [name for name in seen if name in expected] == expected


def test_nothing_is_written_into_the_page_from_elsewhere():
    """Text of models and files goes in as text, never as markup."""
    import unrolled

    for path in (Path(unrolled.__file__).parent / "web").glob("*.js"):
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in path.read_text(encoding="utf-8"), path.name


def test_a_hidden_page_goes_on_without_frames_and_timers(browser, address):
    opened(browser, address, TEXT)
    set_value(browser, "count", "200")
    browser.execute_script(
        "Object.defineProperty(document, 'hidden', { get: () => true });"
        "window.requestAnimationFrame = window.setTimeout = () => 0"
    )
    run(browser)
    assert browser.find_element("id", "status").text == "Done after 200 characters."


def test_an_error_is_seen_from_where_the_button_is_on_a_phone(browser, address):
    opened(browser, address, TEXT)
    resize(browser, "phone")
    browser.execute_script(
        "const { Engine } = await import(new URL('engine.js', location));"
        "Engine.prototype.call = () => { throw new Error('memory'); }"
    )
    browser.find_element("id", "run").click()
    wait_for(browser, lambda _: browser.find_element("id", "failure").is_displayed())
    place = "return document.getElementById('failure').getBoundingClientRect().toJSON()"
    box = browser.execute_script(place)
    assert 0 <= box["top"] < box["bottom"] <= WIDTHS["phone"][1]
