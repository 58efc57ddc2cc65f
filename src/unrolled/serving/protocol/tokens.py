"""The bodies of /tokenize and /detokenize, in the form of vLLM."""

from pydantic import Field

from unrolled.serving.protocol.fields import Body, Ids


class TokenizeRequest(Body):
    """A text to encode, by default with the first model."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="has no effect: none are added")
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids to decode, by default with the first model."""

    model: str | None = None
    tokens: Ids
