"""The answers of the server, as `/openapi.json` describes them.

The routes return plain JSON, which the server does not check against these classes; the tests do.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length"]


class Answer(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Answer):
    """How the tokens of the prompt were read."""

    cached_tokens: int = Field(description="tokens that a state held already, so they were not read again")


class Usage(Answer):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Continued(Answer):
    """The fields that answers with text and with images share."""

    id: str
    created: int = Field(description="seconds since 1970")
    model: str
    usage: Usage
    state: str | None = Field(None, description="id of the state at the end, with keep and a single choice")


class Logprobs(Answer):
    """Natural logarithms of probabilities, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Answer):
    """A continuation."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish | None
    state: str | None = None


class Completion(Continued):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[Choice]


class Token(Answer):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Token):
    """The token that was drawn, and the most likely tokens in its place."""

    top_logprobs: list[Token]


class ChatLogprobs(Answer):
    """The tokens of a message."""

    content: list[ChosenToken]
    refusal: None


class AnswerMessage(Answer):
    """The reply of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of the replies."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    state: str | None = None


class ChatCompletion(Continued):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Image(Answer):
    """The pixels that were drawn, or the whole image as a file."""

    index: int
    pixels: list[int] | None = None
    b64_png: str | None = None
    state: str | None = None


class ImageCompletion(Continued):
    """The answer of /v1/images/completions."""

    object: Literal["image.completion"]
    data: list[Image]


class ModelDetails(Answer):
    """Details that are not part of OpenAI's description of a model."""

    digest: str
    kind: Literal["text", "image"]
    shape: list[int] | None = Field(description="height and width of an image, then 3 for colour")
    levels: int | None = Field(description="number of levels of a pixel or colour")
    state_bytes: int = Field(description="bytes of a state before any token")
    state_bytes_per_token: int = Field(description="bytes that each token adds to a state")
    max_model_len: int | None = Field(description="maximum tokens of a sequence; null without a limit")
    chat: bool = Field(description="whether the model has a chat template")
    mechanisms: list[str] | None
    parameters: int | None
    weights: str | None


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    unrolled: ModelDetails


class ModelList(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class StateInfo(Answer):
    """A state that was uploaded."""

    id: str
    object: Literal["state"]
    length: int = Field(description="tokens of the sequence so far")


class Session(Answer):
    """A name and the state that it points to."""

    name: str
    state: str


class Tokenized(Answer):
    """The ids of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of ids."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The properties of a tokenizer; its special tokens are further fields."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int | None
    chat_template: str | None


class Health(Answer):
    """The status of the server."""

    status: Literal["ok", "ready"]


def answers(kind: type[BaseModel], *statuses: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's answers for FastAPI.

    Args:
        kind: class of the JSON object.
        statuses: statuses with which the object is returned; by default 200.
        stream: whether a stream of events may be returned instead.
    """
    told: dict[str, Any] = {"model": kind} | ({"content": {"text/event-stream": {}}} if stream else {})
    return dict.fromkeys(statuses or (200,), told)
