"""Errors in the form that OpenAI's clients read."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from unrolled.serving.jobs import BusyError, EngineError, StoppingError, TimedOutError, TooLargeError

WANTED = {
    "prompt": "a text, a list of texts, token ids, or lists of token ids",
    "stop": "a text of 1 to 1,000 characters, or a list of up to 16",
    "content": "a text, or a list of parts of the type text",
}
"""What the fields accept that take values of several types."""


class ApiError(HTTPException):
    """An error that is reported to a client.

    Args:
        status_code: status of the HTTP response.
        message: one sentence.
        param: the field or header that is wrong.
        code: code of the error for programs, such as `context_length_exceeded`.
        headers: headers of the response.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return error_body(self.status_code, str(self.detail), self.param, self.code)

    def response(self) -> JSONResponse:
        """Return the response with this error."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _plain(message), "type": kind, "param": _plain(param), "code": code}}


def of_engine(error: Exception) -> ApiError:
    """Return the error for the client that stands for an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(
            429, "the queue is full: try again later", code="queue_full", headers={"retry-after": "1"}
        )
    if isinstance(error, TooLargeError):
        return invalid(f"the request is too large: {error}", code="too_large")
    if isinstance(error, TimedOutError):
        return ApiError(504, "the request ran past its deadline", code="deadline_exceeded")
    if isinstance(error, StoppingError):
        return ApiError(503, "the server is stopping", code="stopping", headers={"retry-after": "1"})
    if isinstance(error, EngineError):
        return ApiError(500, f"the engine failed: {error}", code="engine_error")
    raise error


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for the client that stands for an invalid body or parameter."""
    first = errors[0]
    place = [str(x) for x in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if first["type"] == "value_error":  # from a check between fields: its sentence begins with the field
        sentence = str(first["msg"]).removeprefix("Value error, ")
        return invalid(sentence, ".".join([*place, sentence.split()[0]]))
    if not place:
        return invalid("the body must be a JSON object, sent with content-type application/json")
    names = [x for x in place if x.isidentifier() or x.isdigit()]  # without the types that a union tried
    param = ".".join(names) or place[0]
    if first["type"] == "extra_forbidden":
        return invalid(f"{param} is not a known field", param, "unknown_field")
    # A union tried types, which follow the field; a field of one type in another body has no such place.
    wanted = next((name for name in place[:-1] if name in WANTED), None)
    if wanted is not None:
        param = ".".join(names[: names.index(wanted) + 1])
        return invalid(f"{param} must be {WANTED[wanted]}", param)
    if first["type"] == "missing":
        return invalid(f"{param} is missing", param, "missing_field")
    message = str(first["msg"])
    return invalid(f"{param}: {message[:1].lower()}{message[1:]}", param)


def _plain(text: str | None) -> str | None:
    """Replace surrogates, which the JSON of a client may hold."""
    return None if text is None else text.encode("utf-8", "replace").decode()
