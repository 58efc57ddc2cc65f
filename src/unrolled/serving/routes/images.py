"""/v1/images/completions."""

import base64
import io
import math
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.gone import unless_gone
from unrolled.serving.jobs import Drawn, Finished
from unrolled.serving.logs import record_of
from unrolled.serving.model import Served
from unrolled.serving.protocol.answers import ImageCompletion, answers
from unrolled.serving.protocol.errors import invalid
from unrolled.serving.protocol.images import ImageRequest
from unrolled.serving.routes.continuing import check_ids
from unrolled.serving.runs import Asked, Runs
from unrolled.serving.service import service_of
from unrolled.serving.streams import Chunks, stream

router = APIRouter()


@router.post("/v1/images/completions", responses=answers(ImageCompletion, stream=True))
async def complete_image(body: ImageRequest, request: Request) -> Response:
    """Draw the rest of an image, pixel by pixel."""
    service = service_of(request)
    served = service.model(body.model)
    if served.shape is None:
        raise invalid(f"the model {served.name} writes text: ask /v1/completions", "model")
    pixels = check_ids(body.pixels or [], served.vocab_size, "pixels")
    state = None if body.state is None else await service.snapshot(body.state, served)
    start = [served.vocab_size] if served.start_token and state is None else []
    if state is None and not start + pixels:
        raise invalid("pixels is empty, but the model has no start symbol and there is no state", "pixels")
    known = len(pixels) + (0 if state is None else state.length - int(served.start_token))
    asked = Asked(
        state=state,
        sampling=body.sampling(),
        seed=body.seed,
        n=body.n or 1,
        stops=[],
        watch=None,
        logprobs=None,
        prompt_logprobs=False,
        keep=bool(body.keep),
    )
    limit = _left(served.shape, known, body.rows)
    runs = Runs(service, served, [start + pixels], [limit], asked, record_of(request))
    drawing = _Drawing(served, body, pixels, runs)
    if body.stream:
        return await stream(request, drawing.chunks())
    return JSONResponse(await unless_gone(request, drawing.whole()))


def _left(shape: tuple[int, ...], known: int, rows: int | None) -> int:
    """Return the number of levels to draw, to the end of `rows` rows or of the image."""
    row, whole = math.prod(shape[1:]), math.prod(shape)
    left = whole - known
    if left < 1:
        size = " x ".join(map(str, shape))
        raise invalid(
            f"pixels and state have {known} levels, but an image of {size} is whole with {whole}",
            "pixels",
            "context_length_exceeded",
        )
    return left if rows is None else min(left, rows * row - known % row)


class _Drawing:
    """The answer to one request, as chunks or as a whole."""

    def __init__(self, served: Served, body: ImageRequest, pixels: list[int], runs: Runs) -> None:
        self._served, self._body, self._pixels, self._runs = served, body, pixels, runs
        self._about = {"id": f"imgcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}

    async def whole(self) -> dict[str, Any]:
        """Return the response."""
        drawn: list[list[int]] = [[] for _ in range(self._runs.count)]
        top: dict[str, Any] = {}
        states: list[str | None] = [None] * len(drawn)
        async for _, event in self._runs.events():
            if isinstance(event, Drawn):
                drawn[event.index] += event.tokens
            elif isinstance(event, Finished):
                states = await self._runs.kept(event)
        data = [{"index": index, **self._image(pixels)} for index, pixels in enumerate(drawn)]
        if len(data) == 1 and states[0] is not None:
            top["state"] = states[0]
        else:
            data = [
                x if state is None else x | {"state": state} for x, state in zip(data, states, strict=True)
            ]
        about = {**self._about, "object": "image.completion"}
        return about | {"data": data, "usage": self._runs.usage()} | top

    async def chunks(self) -> Chunks:
        """Yield the chunks of a stream; the last ones have the states and the usage."""
        about = {**self._about, "object": "image.completion.chunk"}
        async for _, event in self._runs.events():
            if isinstance(event, Drawn) and event.tokens:
                yield about | {"data": [{"index": event.index, "pixels": event.tokens}]}
            elif isinstance(event, Finished):
                states = await self._runs.kept(event)
                alone = len(states) == 1
                for index, state in enumerate(states):
                    if state is not None:
                        part = {"index": index, "pixels": []}
                        yield about | (
                            {"data": [part], "state": state} if alone else {"data": [part | {"state": state}]}
                        )
        yield about | {"data": [], "usage": self._runs.usage()}

    def _image(self, new: list[int]) -> dict[str, Any]:
        if self._body.response_format != "b64_png":
            return {"pixels": new}
        return {"b64_png": base64.b64encode(self._png(self._pixels + new)).decode()}

    def _png(self, pixels: list[int]) -> bytes:
        """Return the image as a file; pixels that were not drawn are black."""
        from PIL import Image

        height, width, *colours = shape = self._served.shape or (0, 0)
        levels = self._served.vocab_size
        shown = bytes(pixel * 255 // max(1, levels - 1) for pixel in pixels).ljust(math.prod(shape), b"\0")
        file = io.BytesIO()
        Image.frombytes("RGB" if colours else "L", (width, height), shown).save(file, "PNG")
        return file.getvalue()
