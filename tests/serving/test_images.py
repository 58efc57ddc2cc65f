"""/v1/images/completions: pixels, pictures, rows and states."""

import base64
import io
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from serving.clients import client, post, streamed
from serving.fakes import FakeEngine, FakeStates, pixel_model

IMAGES = "/v1/images/completions"


def drawn(engine: FakeEngine | None = None, states: FakeStates | None = None, **body: Any) -> Any:
    return post(client(pixel_model(engine), states=states), IMAGES, model="digits", **body)


def test_an_image_is_drawn_to_its_end() -> None:
    engine = FakeEngine(16)
    found = drawn(engine, pixels=[1, 2, 3], n=2, seed=1)
    assert engine.jobs[0].tokens == [16, 1, 2, 3]
    assert found["object"] == "image.completion"
    assert [x["index"] for x in found["data"]] == [0, 1]
    assert [len(x["pixels"]) for x in found["data"]] == [9, 9]
    assert found["data"][0]["pixels"] != found["data"][1]["pixels"]
    assert found["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize(
    ("pixels", "rows", "expected"), [(0, 1, 4), (3, 1, 1), (4, 1, 4), (3, 2, 5), (5, 9, 7)]
)
def test_rows_end_at_the_border(pixels: int, rows: int, expected: int) -> None:
    assert len(drawn(pixels=[0] * pixels, rows=rows)["data"][0]["pixels"]) == expected


def test_a_picture_holds_the_whole_image() -> None:
    engine = FakeEngine(16, script=[15, 0, 3])
    [image] = drawn(engine, pixels=[5], response_format="b64_png", rows=2)["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(image["b64_png"])))
    assert (picture.size, picture.mode) == ((4, 3), "L")
    assert list(picture.tobytes()) == [85, 255, 0, 51, 255, 0, 51, 255, 0, 0, 0, 0]


def test_a_colour_image_has_three_levels_for_a_pixel() -> None:
    served = replace(pixel_model(FakeEngine(16)), shape=(2, 2, 3))
    body = {"model": "digits", "pixels": [5, 0, 15, 1], "response_format": "b64_png"}
    [image] = post(client(served), IMAGES, **body)["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(image["b64_png"])))
    assert (picture.size, picture.mode) == ((2, 2), "RGB")
    assert len(picture.tobytes()) == 12
    assert picture.getpixel((0, 0)) == (85, 0, 255)
    [part] = post(client(served), IMAGES, model="digits", pixels=[5, 0, 15, 1], rows=1)["data"]
    assert len(part["pixels"]) == 2
    [full] = post(client(served), IMAGES, model="digits", pixels=[0])["data"]
    assert len(full["pixels"]) == 11


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_image_goes_on_from_its_state(n: int, stream: bool) -> None:
    states = FakeStates()
    http = client(pixel_model(), states=states)
    body = {"model": "digits", "rows": 1, "temperature": 0, "keep": True, "n": n}
    if stream:
        *chunks, done = streamed(http, IMAGES, **body)
        assert done == "[DONE]"
        assert chunks[-1]["usage"]["completion_tokens"] == 4 * n
        first = [p for x in chunks[:-1] for y in x["data"] if y["index"] == 0 for p in y["pixels"]]
        kept = [x.get("state") or x["data"][0].get("state") for x in chunks[:-1]]
        state = next(x for x in kept if x)
    else:
        found = post(http, IMAGES, **body)
        first = found["data"][0]["pixels"]
        assert ("state" in found) == (n == 1)
        state = found["state"] if n == 1 else found["data"][0]["state"]
    assert state in states.kept
    rest = post(http, IMAGES, model="digits", temperature=0, state=state)["data"][0]["pixels"]
    assert first + rest == drawn(temperature=0)["data"][0]["pixels"]
