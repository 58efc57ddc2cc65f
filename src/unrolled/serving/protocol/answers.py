"""What the server answers, as `/openapi.json` describes it.

The routes answer plain JSON, which is not checked against these; the tests do.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length"]


class Answer(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Answer):
    """How the tokens of the prompt were read."""

    cached_tokens: int = Field(description="tokens that a state held already, so that they were not read")


class Usage(Answer):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Continued(Answer):
    """What the answers about texts and images share."""

    id: str
    created: int = Field(description="seconds since 1970")
    model: str
    usage: Usage
    state: str | None = Field(None, description="the id of the state at the end, with keep and one choice")


class Logprobs(Answer):
    """Natural logarithms of probabilities, an entry for each token."""

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
    """The token that was drawn, and the most likely ones in its place."""

    top_logprobs: list[Token]


class ChatLogprobs(Answer):
    """The tokens of a message."""

    content: list[ChosenToken]
    refusal: None


class AnswerMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """A reply."""

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
    """What OpenAI's description of a model does not say."""

    digest: str
    kind: Literal["text", "image"]
    shape: list[int] | None = Field(description="height and width of an image, and 3 in colour")
    levels: int | None = Field(description="of grey")
    state_bytes: int = Field(description="of a state that has read nothing")
    state_bytes_per_token: int = Field(description="by which each token makes it larger")
    max_model_len: int | None = Field(description="the most tokens it can read; null without a limit")
    chat: bool = Field(description="whether it has a chat template")
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
    """A state that was taken."""

    id: str
    object: Literal["state"]
    length: int = Field(description="tokens that it has read")


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
    """What a client wants to know of a tokenizer; its special tokens are further fields."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int | None
    chat_template: str | None


class Health(Answer):
    """How the server is."""

    status: Literal["ok", "ready"]


def answers(kind: type[BaseModel], *statuses: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what a route tells FastAPI of its answers.

    Args:
        kind: of the JSON object.
        statuses: with which it comes; by default 200.
        stream: whether a stream of events may come in its place.
    """
    told: dict[str, Any] = {"model": kind} | ({"content": {"text/event-stream": {}}} if stream else {})
    return dict.fromkeys(statuses or (200,), told)
