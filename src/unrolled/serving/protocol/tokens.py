"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from unrolled.serving.protocol.fields import Body


class TokenizeRequest(Body):
    """A text; without a model, for the first one."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids; without a model, of the first one."""

    model: str | None = None
    tokens: list[int]
