"""The fields that all requests to continue a sequence share."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from unrolled.decode.request import LEAST_PENALTY, Sampling
from unrolled.serving.store.checks import DIGEST

MOST_TOKENS = 1_000_000
"""Maximum number of new tokens of one continuation."""
MOST_ROWS = 2_048
"""Maximum number of continuations of one request."""

StateId = Annotated[str, StringConstraints(pattern=f"^{DIGEST.pattern}$")]
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Count = Annotated[int, Field(ge=1, le=128)]
# Of a long list, only the first wrong item is reported: an error for each would take minutes and gigabytes.
FIRST_ERROR = Field(fail_fast=True)
Ids = Annotated[list[int], FIRST_ERROR]
Logprobs = Annotated[int, Field(ge=0, le=20)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1_000)]
Stops = StopText | Annotated[list[StopText], Field(max_length=16)]


def neutral(*values: bool | int | str | list[JsonValue] | dict[str, JsonValue]) -> Any:
    """Return the default of a field that is not supported: it may only be left out, null or a given value."""
    return Field(None, description=_left_out(values), json_schema_extra={"enum": [*values, None]})


def _left_out(values: Sequence[object]) -> str:
    *first, last = ["left out", *map(repr, values)]
    return f"must be {', '.join(first)} or {last}"


class Body(BaseModel):
    """The body of a request. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_neutral(self) -> Self:
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            allowed = extra.get("enum") if isinstance(extra, dict) else None
            if isinstance(allowed, list) and getattr(self, name) not in allowed:
                raise ValueError(f"{name} is not supported, and {_left_out(allowed[:-1])}")
        return self


class Continuation(Body):
    """The fields that texts and images share. A field that is null has its default."""

    model: str
    n: Count | None = Field(None, description="continuations of each prompt; by default 1")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="0 is greedy; by default 1")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 and -1 keep all tokens")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    state: StateId | None = Field(None, description="the id of a state to continue")
    keep: bool | None = Field(
        None, description="keep the state at the end, after a stop text too, and return its id"
    )

    def sampling(self) -> Sampling:
        """Return how tokens are drawn."""
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else None
        return Sampling(1.0 if self.temperature is None else float(self.temperature), top_k, self.top_p)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="end with a chunk that has the usage")
    continuous_usage_stats: bool | None = Field(None, description="have the usage in every chunk, as in vLLM")
    include_obfuscation: bool | None = neutral(False)


class TextContinuation(Continuation):
    """The fields that completions and chat share."""

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY)] | None = Field(
        None,
        description="above 1, makes tokens of this prompt and answer less likely; tokens that `state` has "
        "read do not count",
    )
    stop: Stops | None = None
    ignore_eos: bool | None = Field(None, description="do not end at a token that ends a text")
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = neutral(0)
    presence_penalty: float | None = neutral(0)
    logit_bias: dict[str, float] | None = neutral({})
    user: str | None = Field(None, description="has no effect")
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    store: bool | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = Field(None, description="has no effect")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but requires stream")
        return self

    @property
    def limit(self) -> int | None:
        """The maximum number of new tokens that was asked for."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The texts that end a continuation."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> Sampling:
        """Return how tokens are drawn."""
        penalty = 1.0 if self.repetition_penalty is None else float(self.repetition_penalty)
        return super().sampling()._replace(min_p=self.min_p, repetition_penalty=penalty)
