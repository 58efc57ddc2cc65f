"""/v1/chat/completions."""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.choices import chat_logprobs
from unrolled.serving.gone import unless_gone
from unrolled.serving.protocol.answers import ChatCompletion, answers
from unrolled.serving.protocol.chat import MOST_TOKENS, ChatRequest, choice
from unrolled.serving.protocol.errors import invalid
from unrolled.serving.routes.continuing import Continuing, encode, state_of
from unrolled.serving.service import service_of
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.streams import Chunks, stream
from unrolled.serving.templates import render, render_after
from unrolled.serving.text import Text

router = APIRouter()


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, stream=True))
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer in a conversation; with a state, only the messages that follow it are given."""
    served = service_of(request).model(body.model)
    if served.text is None or served.text.chat_template is None:
        raise invalid(
            f"the model {served.name} has no chat template: ask /v1/completions", "model", "no_chat_template"
        )
    state = await state_of(request, body, served)
    prompt = await encode(served.text, _rendered(served.text, body, state), "messages", state, special=True)
    continuing = Continuing.start(
        request,
        served,
        served.text,
        body,
        state,
        [prompt],
        param="messages",
        default=MOST_TOKENS,
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
    )
    answer = _Answer(served.name, body, continuing)
    if body.stream:
        return await stream(request, answer.chunks())
    return JSONResponse(await unless_gone(request, answer.whole()))


def _rendered(text: Text, body: ChatRequest, state: Snapshot | None) -> str:
    """Return the text to read: all messages, or after a state what follows the answer in which it ends."""
    messages, template = [x.plain() for x in body.messages], text.chat_template or ""
    try:
        if state is None:
            return render(template, messages, text.special_tokens)
        if not messages:
            return ""
        return render_after(template, messages, text.special_tokens)
    except ValueError as error:
        raise invalid(str(error), "messages") from None


class _Answer:
    """The answer to one request, as chunks or as a whole."""

    def __init__(self, model: str, body: ChatRequest, continuing: Continuing) -> None:
        self._body, self._continuing = body, continuing
        self._about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Return the response."""
        runs, top = self._continuing.runs, dict[str, Any]()
        texts, found = [""] * runs.count, [dict[str, Any]() for _ in range(runs.count)]
        logprobs: list[Any] = [[] for _ in found]
        async for piece in self._continuing.pieces():
            texts[piece.index] += piece.text
            logprobs[piece.index] += piece.logprobs or []
            if piece.finish is not None:
                state = None if self._continuing.alone else piece.state
                message = {"role": "assistant", "content": texts[piece.index], "refusal": None}
                told = self._logprobs(logprobs[piece.index])
                found[piece.index] = choice(piece.index, message, told, piece.finish, state, field="message")
                if piece.state is not None and self._continuing.alone:
                    top["state"] = piece.state
        about = {**self._about, "object": "chat.completion"}
        return about | {"choices": found, "usage": runs.usage()} | top

    async def chunks(self) -> Chunks:
        """Yield the chunks of a stream."""
        about, alone = {**self._about, "object": "chat.completion.chunk"}, self._continuing.alone
        async for piece in self._continuing.pieces():
            delta = {"content": piece.text} if piece.text else {}
            if piece.prompted is not None:
                delta = {"role": "assistant", "content": ""}
            logprobs = None if piece.logprobs is None else self._logprobs(piece.logprobs)
            state = None if alone else piece.state
            part = choice(piece.index, delta, logprobs, piece.finish, state, field="delta")
            top = {"state": piece.state} if alone and piece.state is not None else {}
            if delta or logprobs or piece.finish:
                yield about | {"choices": [part]} | top | self._continuing.usage_so_far
        if self._body.include_usage:
            yield about | {"choices": [], "usage": self._continuing.runs.usage()}

    def _logprobs(self, found: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._continuing.text, found) if self._body.logprobs else None
