"""The parts of the page that can be held against Python's, in the browser that runs them."""

import hashlib
import json
import random
from dataclasses import asdict
from itertools import product

import pytest
import torch
from browser import CHARACTERS
from corpora import story

from unrolled.data import Vocabulary
from unrolled.data._tokenizer import TextTokenizer
from unrolled.generation import sampling


@pytest.fixture
def javascript(browser, address):
    """Evaluate an expression in which `module` is a module of the page and `x` a value from here."""
    browser.get(address + "icon.svg")  # the same origin, without the page

    def evaluate(name, expression, x):
        found = browser.execute_async_script(
            f"const x = JSON.parse(arguments[0]); import({json.dumps(address + name)})"
            f".then(async (module) => arguments[1](await ({expression})))"
            ".catch((error) => arguments[1]('failed: ' + error))",
            json.dumps(x),
        )
        assert not str(found).startswith("failed"), found
        return found

    return evaluate


def test_both_ways_to_hash_agree_with_hashlib(javascript):
    contents = [[i % 251 for i in range(n)] for n in (0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 1000)]
    expected = [hashlib.sha256(bytes(content)).hexdigest() for content in contents]
    ways = "[module.sha256, module.plainSha256]"
    found = javascript(
        "sha256.js",
        f"Promise.all({ways}.map((hash) => Promise.all(x.map((content) => hash(Uint8Array.from(content))))))",
        contents,
    )
    assert found == [expected, expected]


def test_a_draw_is_the_one_that_python_makes_of_the_same_random_number(javascript):
    source = random.Random(0)
    cases, expected = [], []
    options = product([0, 0.5, 1.3], [None, 1, 4], [None, 0.3, 0.9], [None, 0.2], [1.0, 1.7])
    for temperature, top_k, top_p, min_p, penalty in options:
        logits = [source.gauss(0, 2) for _ in range(12)]
        seen, number = source.sample(range(12), 4), source.random()
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        cases.append([logits, {**settings, "repetition_penalty": penalty}, number, seen])

        x = torch.tensor([logits], dtype=torch.float64)
        mask = torch.zeros(1, 12, dtype=torch.bool)
        mask[0, seen] = True
        x = sampling.temperature(sampling.repetition_penalty(x, mask, penalty), temperature)
        for name in ("top_k", "top_p", "min_p"):
            if settings[name] is not None:
                x = getattr(sampling, name)(x, settings[name])
        mass = x.softmax(-1).cumsum(-1)
        expected.append(int(torch.searchsorted(mass, number * mass[:, -1:], right=True)))
    # A nucleus of 1 leaves nothing out, though the rest of the mass vanishes beside the likeliest.
    everything = {"temperature": 1, "top_k": None, "top_p": 1, "min_p": None, "repetition_penalty": 1}
    cases.append([[-40.0, 0.0], everything, 0, []])
    expected.append(0)
    call = "module.draw(logits, settings, () => number, new Set(seen))"
    assert (
        javascript("sampling.js", f"x.map(([logits, settings, number, seen]) => {call})", cases) == expected
    )


def test_a_vocabulary_is_sorted_only_for_what_needs_its_order(javascript):
    plain = {"temperature": 1, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1}
    options = [{}, {"min_p": 0.1}, {"top_p": 1}, {"top_k": 2}, {"top_p": 0.5}]
    counted = (
        "(() => { const { sort } = Array.prototype; let count = 0;"
        "  Array.prototype.sort = function (...given) { count++; return sort.apply(this, given); };"
        "  try { module.draw([0, 1, 2], settings, Math.random, new Set()); } finally { Array.prototype.sort = sort; }"
        "  return count; })()"
    )
    cases = [plain | option for option in options]
    assert javascript("sampling.js", f"x.map((settings) => {counted})", cases) == [0, 0, 0, 1, 1]


def test_logits_that_are_no_numbers_are_not_drawn_from(javascript):
    settings = {"temperature": 0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1}
    call = "module.draw([0, NaN, 1], x, Math.random, new Set())"
    made = f"(() => {{ try {{ return {call}; }} catch (error) {{ return error.message; }} }})()"
    assert "no number" in str(javascript("sampling.js", made, settings))


def test_random_numbers_are_even_and_follow_the_seed(javascript):
    numbers = "(seed) => { const next = module.makeRandom(seed); return Array.from({ length: 4000 }, next); }"
    first, again, other = javascript("sampling.js", f"x.map({numbers})", [1, 1, 2])
    assert first == again != other
    assert all(0 <= number < 1 for number in first)
    counts = torch.histc(torch.tensor(first), 10, 0, 1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 27.9  # chi square of 9 degrees, 1 in 1000


def test_texts_are_encoded_and_read_back(javascript):
    text = "Kéy in"
    made = (
        "((words) => { const ids = words.encode(x.text); return [ids, ids.map(words.reader()).join('')]; })"
        "(new module.Vocabulary(x))"
    )
    found = javascript("vocabulary.js", made, {"kind": "text", "characters": CHARACTERS, "text": text})
    assert found == [[CHARACTERS.index(c) for c in text], text]
    found = javascript("vocabulary.js", made, {"kind": "text", "characters": None, "text": "\ufeffé€x"})
    assert found == [list("\ufeffé€x".encode()), "\ufeffé€x"]
    assert javascript("vocabulary.js", made, {"kind": "ids", "text": "3 14"}) == [[3, 14], " 3 14"]


def test_byte_pairs_are_those_of_the_library(javascript):
    tokenizer = TextTokenizer.learn([story(i) for i in range(200)], 340)
    alphabet = "ab 's\n\t1.,é注🙂\u00a0\u0301ǅªⅧ²\u3000_'LLd\ufeff\u0085"
    draw = random.Random(0)
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(30))) for _ in range(300)]
    texts += [
        "".join(map(story, range(50))),
        "".join(draw.choices("aehinst", k=20_000)),
        "",
        " ",
        "<|endoftext|>",
        "it's we'LL  x\n\n\n y ",
    ]
    expected = [tokenizer.encode(text) for text in texts]
    made = "new module.Vocabulary({ kind: 'tokenizer', tokenizer: x.tokenizer })"
    given = {"tokenizer": tokenizer.to_json(), "texts": texts, "ids": expected}
    assert javascript("vocabulary.js", f"x.texts.map((text) => {made}.encode(text))", given) == expected
    read = "((read) => ids.map(read).join(''))"
    found = javascript("vocabulary.js", f"x.ids.map((ids) => {read}({made}.reader()))", given)
    assert found == texts


@pytest.mark.parametrize(
    ("fields", "opening"),
    [
        ({"characters": sorted(set("KING:\nWhat ")), "data": "tiny-shakespeare"}, "KING:\nWhat "),
        ({"characters": None, "data": "tiny-shakespeare"}, "KING:\nWhat "),
        ({"characters": sorted(set("KING:\nWhat ")), "data": "mein-buch.txt"}, "\n"),
        ({"characters": None}, "\n"),
        ({"characters": ["a", "b"], "data": "tiny-shakespeare"}, "a"),
        ({"data": "tiny-shakespeare"}, "KING:\nWhat"),
        ({}, "\n"),
    ],
)
def test_the_page_opens_with_what_fits_the_text_and_can_be_read(javascript, fields, opening):
    if "characters" in fields:
        vocabulary = Vocabulary("text", **fields)
    else:
        pairs = TextTokenizer.learn([], 257).to_json()
        vocabulary = Vocabulary("tokenizer", tokenizer=pairs, end=0, **fields)
    found = javascript("vocabulary.js", "new module.Vocabulary(x).opening()", asdict(vocabulary))
    assert found == opening
    assert vocabulary.decode(torch.tensor(vocabulary.encode(found))) == found


CANVAS = 'document.createElementNS("http://www.w3.org/1999/xhtml", "canvas")'
PAINTED = f"""(() => {{
  const canvas = {CANVAS};
  module.paintImage(canvas, x.shape, 16, x.given, x.made, [0, 255, 0]);
  return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}})()"""


def test_images_in_colour_are_painted_as_they_are(javascript):
    found = javascript(
        "pictures.js", PAINTED, {"shape": [1, 3, 3], "given": [15, 0, 5], "made": [0, 15, 3, 15]}
    )
    assert found == [255, 0, 85, 255, 0, 255, 51, 255, 38, 44, 50, 255]  # of the third, one level is there
    found = javascript("pictures.js", PAINTED, {"shape": [1, 2], "given": [15], "made": [0]})
    assert found == [255, 255, 255, 255, 0, 0, 0, 255]


PAD = f"""(() => {{
  const pad = new module.Pad({CANVAS}, {{ changed() {{}}, say() {{}} }});
  pad.resize(4, 5, x);
  pad.rows = 3;
  pad.stroke({{ x: 2, y: 1 }}, {{ x: 2, y: 1 }});
  return pad.ids(256);
}})()"""


def test_a_stroke_on_the_pad_is_white_in_every_colour(javascript):
    grey, colours = javascript("pad.js", PAD, 1), javascript("pad.js", PAD, 3)
    assert len(grey) == 15
    assert max(grey) == grey[7] == 255
    assert colours == [level for level in grey for _ in range(3)]


TWO_FINGERS = f"""(() => {{
  const canvas = {CANVAS};
  Object.assign(canvas, {{ setPointerCapture() {{}}, getBoundingClientRect: () => ({{ left: 0, top: 0, width: 8, height: 4 }}) }});
  const pad = new module.Pad(canvas, {{ changed() {{}}, say() {{}} }});
  pad.resize(4, 8);
  for (const [type, pointerId, clientX, clientY] of x) canvas.dispatchEvent(new PointerEvent(type, {{ pointerId, clientX, clientY }}));
  return Array.from(pad.ink, (ink, i) => ink > 0.9 ? i : -1).filter((i) => i >= 0);
}})()"""


def test_a_second_finger_draws_nothing(javascript):
    first = [("pointerdown", 1, 0.5, 0.5), ("pointermove", 1, 1.5, 0.5)]
    second = [("pointerdown", 2, 7.5, 3.5), ("pointermove", 2, 6.5, 3.5), ("pointerup", 2, 6.5, 3.5)]
    last = [("pointermove", 1, 2.5, 0.5), ("pointerup", 1, 2.5, 0.5), ("pointermove", 1, 7.5, 3.5)]
    assert javascript("pad.js", TWO_FINGERS, [*first, *second, *last]) == [0, 1, 2]
    assert javascript("pad.js", TWO_FINGERS, [*first, *last, *second]) == [0, 1, 2, 30, 31]


def test_a_chart_may_have_many_points(javascript):
    drawn = javascript(
        "pictures.js",
        "(() => { const figure = document.createElementNS('http://www.w3.org/1999/xhtml', 'figure');"
        "  figure.innerHTML = '<p class=\"key\"></p>';"
        "  const points = Array.from({ length: x }, (_, i) => [i, i]);"
        "  module.paintChart(figure, 'Memory', [{ className: 'a', name: 'a', points, value: 1 }], x, String);"
        "  return figure.querySelector('polyline').getAttribute('points').split(' ').length; })()",
        200_000,
    )
    assert drawn == 200_000


def test_the_labels_of_a_chart_are_above_its_lines(javascript):
    names = javascript(
        "pictures.js",
        "(() => { const figure = document.createElementNS('http://www.w3.org/1999/xhtml', 'figure');"
        "  figure.innerHTML = '<p class=\"key\"></p>';"
        "  module.paintChart(figure, 'Memory', [{ className: 'a', name: 'a', points: [[0, x], [1, x]], value: x }], 1, String);"
        "  return Array.from(figure.querySelector('svg').children, (child) => child.tagName); })()",
        105,
    )
    assert names.index("text") > names.index("circle") > names.index("polyline")
    assert names.count("text") == 4  # 50, 100, 0 and the tokens


def test_the_keys_of_the_browser_are_left_to_it_on_the_pad(javascript):
    taken = """(() => {
      const canvas = document.createElementNS('http://www.w3.org/1999/xhtml', 'canvas');
      new module.Pad(canvas, { changed: () => {}, say: () => {} });
      return x.map((name) => {
        const event = new KeyboardEvent('keydown', { key: 'ArrowLeft', [name]: true, cancelable: true });
        canvas.dispatchEvent(event);
        return event.defaultPrevented;
      });
    })()"""
    assert javascript("pad.js", taken, ["altKey", "ctrlKey", "metaKey", "shiftKey"]) == [False] * 3 + [True]
