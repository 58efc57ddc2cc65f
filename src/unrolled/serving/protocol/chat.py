"""The body of /v1/chat/completions, and the choices of its response."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from unrolled.serving.protocol.fields import FIRST_ERROR, Body, Logprobs, TextContinuation, neutral

MOST_TOKENS = 1_024
"""Maximum number of new tokens if the request does not say."""


class Part(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], FIRST_ERROR] | None = None
    name: str | None = Field(None, description="has no effect")
    refusal: str | None = Field(None, description="has no effect")
    annotations: list[Any] | None = Field(None, description="has no effect")
    tool_calls: list[Any] | None = neutral([])
    function_call: dict[str, Any] | None = neutral({})
    audio: dict[str, Any] | None = neutral({})

    @model_validator(mode="after")
    def _check_message(self) -> Self:
        if self.content is None:
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, str]:
        """Return the message in the form that templates take."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text"]


class ChatRequest(TextContinuation):
    """A conversation to continue; with a state, only the messages that follow it.

    Without messages, the answer in which the state ends is continued.
    """

    messages: Annotated[list[Message], FIRST_ERROR]
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Any] | None = neutral([])
    tool_choice: Any = neutral("none", "auto")
    parallel_tool_calls: bool | None = Field(None, description="has no effect: there are no tools")
    functions: list[Any] | None = neutral([])
    function_call: Any = neutral("none", "auto")
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = neutral(["text"])
    audio: dict[str, Any] | None = neutral({})

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, but requires logprobs")
        if not self.messages and self.state is None:
            raise ValueError("messages is empty, but only a state can be continued without any")
        return self


def choice(
    index: int,
    message: dict[str, Any],
    logprobs: dict[str, Any] | None,
    finish: str | None,
    state: str | None,
    *,
    field: Literal["message", "delta"],
) -> dict[str, Any]:
    """Return one choice of a response or of a chunk."""
    found = {"index": index, field: message, "logprobs": logprobs, "finish_reason": finish}
    return found if state is None else found | {"state": state}
