"""The body of /v1/completions, and the choices of its response."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from unrolled.serving.protocol.fields import FIRST_ERROR, Ids, Logprobs, TextContinuation, neutral

DEFAULT_TOKENS = 16


class CompletionRequest(TextContinuation):
    """A text to continue."""

    prompt: str | Annotated[list[str], FIRST_ERROR] | Ids | Annotated[list[Ids], FIRST_ERROR] | None = Field(
        None, description="a text, a list of texts, token ids, or lists of token ids"
    )
    echo: bool | None = Field(None, description="begin the answer with the prompt")
    logprobs: Logprobs | None = None
    best_of: int | None = Field(None, description="must be n")
    suffix: str | None = neutral("")

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is not supported, and must be left out or n, {self.n or 1}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The list of prompts, each a text or a list of ids."""
        given = self.prompt
        if given is None or isinstance(given, str):
            return [given or ""]
        if all(isinstance(x, int) for x in given):  # an empty list is a prompt of no ids
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]


def choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None, state: str | None
) -> dict[str, Any]:
    """Return one choice of a response or of a chunk."""
    found: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return found if state is None else found | {"state": state}
