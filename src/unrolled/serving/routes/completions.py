"""/v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.choices import CompletionLogprobs
from unrolled.serving.gone import unless_gone
from unrolled.serving.jobs import Prompted
from unrolled.serving.model import Served
from unrolled.serving.protocol.answers import Completion, answers
from unrolled.serving.protocol.completions import DEFAULT_TOKENS, CompletionRequest, choice
from unrolled.serving.protocol.errors import invalid
from unrolled.serving.routes.continuing import Continuing, aside, check_ids, encode, state_of
from unrolled.serving.service import service_of
from unrolled.serving.streams import Chunks, stream

router = APIRouter()
MOST_PROMPTS = 128
MOST_TOLD = 1_000_000
"""Maximum number of log probabilities of prompts in one answer, which takes about 200 bytes for each."""


@router.post("/v1/completions", responses=answers(Completion, stream=True))
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, several texts, or a state."""
    served = service_of(request).model(body.model)
    if served.text is None:
        raise invalid(f"the model {served.name} draws images: ask /v1/images/completions", "model")
    if len(body.prompts) > MOST_PROMPTS:
        raise invalid(
            f"prompt holds {len(body.prompts)}, but at most {MOST_PROMPTS} are taken at once", "prompt"
        )
    state = await state_of(request, body, served)
    size = sum(map(len, body.prompts))
    prompts = [
        await encode(served.text, x, "prompt", state, size=size)
        if isinstance(x, str)
        else check_ids(x, served.vocab_size, "prompt")
        for x in body.prompts
    ]
    tells_prompts = bool(body.echo) and body.logprobs is not None
    told = sum(map(len, prompts)) * (body.n or 1) * (1 + (body.logprobs or 0))
    if tells_prompts and told > MOST_TOLD:
        raise invalid(
            f"logprobs asks for {told} log probabilities of prompts, but at most {MOST_TOLD} are reported",
            "logprobs",
            "too_large",
        )
    before = [] if state is None else [state.pending]
    texts = [
        x if isinstance(x, str) else await aside(size, partial(served.text.reader(before), x, final=True))
        for x in body.prompts
    ]
    continuing = Continuing.start(
        request,
        served,
        served.text,
        body,
        state,
        prompts,
        param="prompt",
        default=DEFAULT_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=tells_prompts,
    )
    completion = _Completion(served, body, prompts, texts, continuing)
    if body.stream:
        return await stream(request, completion.chunks())
    return JSONResponse(await unless_gone(request, completion.whole()))


class _Completion:
    """The answer to one request, as chunks or as a whole; `texts` are those of the prompts."""

    def __init__(
        self,
        served: Served,
        body: CompletionRequest,
        prompts: list[list[int]],
        texts: list[str],
        continuing: Continuing,
    ) -> None:
        self._body, self._prompts, self._texts, self._continuing = body, prompts, texts, continuing
        self._n, self._text = body.n or 1, continuing.text
        self._before = [
            before[: len(before) - len(prompt)]
            for before, prompt in zip(continuing.runs.before, prompts, strict=True)
        ]
        self._logprobs = [
            CompletionLogprobs(self._text, before, held, len(text))
            for before, held, text in zip(continuing.runs.before, continuing.runs.held, texts, strict=True)
            for _ in range(self._n)
        ]
        self._about = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response."""
        runs = self._continuing.runs
        found = [choice(i, "", None, None, None) for i in range(runs.count)]
        top: dict[str, Any] = {}
        async for part in self._parts():
            so_far = found[part["index"]]
            so_far["text"] += part["text"]
            so_far["finish_reason"] = part["finish_reason"]
            if so_far["logprobs"] is None:
                so_far["logprobs"] = part["logprobs"]
            else:
                for name, values in (part["logprobs"] or {}).items():
                    so_far["logprobs"][name] += values
            if "state" in part:
                (top if self._continuing.alone else so_far)["state"] = part["state"]
        return self._about | {"choices": found, "usage": runs.usage()} | top

    async def chunks(self) -> Chunks:
        """Yield the chunks of a stream."""
        async for part in self._parts():
            top = {"state": part.pop("state")} if "state" in part and self._continuing.alone else {}
            yield self._about | {"choices": [part]} | top | self._continuing.usage_so_far
        if self._body.include_usage:
            yield self._about | {"choices": [], "usage": self._continuing.runs.usage()}

    async def _parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield choices, each with the new part of one continuation."""
        async for piece in self._continuing.pieces():
            if piece.prompted is None:
                logprobs = None
                if piece.logprobs is not None:
                    logprobs = self._logprobs[piece.index].of(piece.tokens, piece.logprobs)
                if piece.text or logprobs or piece.finish:
                    yield choice(piece.index, piece.text, logprobs, piece.finish, piece.state)
            elif self._body.echo:
                yield await self._echo(piece.index, piece.prompted)

    async def _echo(self, index: int, prompted: Prompted) -> dict[str, Any]:
        prompt, logprobs = self._prompts[index // self._n], None
        if prompted.logprobs is not None:
            known = prompted.logprobs[len(prompted.logprobs) - len(prompt) :]  # without the start symbol
            before = self._before[index // self._n]
            of = CompletionLogprobs(self._text, before, (), 0).of
            logprobs = await aside(len(prompt), partial(of, prompt, known))
        return choice(index, self._texts[index // self._n], logprobs, None, None)
