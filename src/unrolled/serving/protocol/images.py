"""The body of /v1/images/completions."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unrolled.serving.protocol.fields import Continuation


class ImageRequest(Continuation):
    """The beginning of an image, to be drawn to its end."""

    pixels: list[int] | None = Field(
        None, description="the first levels, row by row, of a colour red, green and blue; by default none"
    )
    rows: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="rows to draw; by default to the end"
    )
    response_format: Literal["pixels", "b64_png"] | None = None

    @model_validator(mode="after")
    def _check_image(self) -> Self:
        if self.response_format == "b64_png" and self.stream:
            raise ValueError("response_format is b64_png, but a stream has pixels")
        if self.response_format == "b64_png" and self.state is not None:
            raise ValueError(
                "response_format is b64_png, but of a state only the new pixels are known: ask for pixels"
            )
        return self
