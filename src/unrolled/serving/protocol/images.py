"""The body of /v1/images/completions."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unrolled.serving.protocol.fields import Continuation, Ids


class ImageRequest(Continuation):
    """The beginning of an image, whose rest is to be drawn."""

    pixels: Ids | None = Field(
        None, description="the first levels, row by row; red, green and blue for a colour; by default none"
    )
    rows: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="number of rows to draw; by default all that are left"
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
