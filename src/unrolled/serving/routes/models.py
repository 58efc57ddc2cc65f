"""/v1/models: the models that are served."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.model import Served
from unrolled.serving.protocol.answers import Model, ModelList, answers
from unrolled.serving.service import service_of

router = APIRouter()
MANY = 1_024  # tokens over which the growth of a state is averaged


@router.get("/v1/models", responses=answers(ModelList))
async def models(request: Request) -> Response:
    """List the models."""
    data = [described(served) for served in service_of(request).models.values()]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{id:path}", responses=answers(Model))
async def model(id: str, request: Request) -> Response:
    """Describe one model."""
    return JSONResponse(described(service_of(request).model(id)))


def described(served: Served) -> dict[str, Any]:
    """Return OpenAI's description of a model, with further details in the field "unrolled"."""
    empty, many = served.engine.state_bytes(0), min(MANY, served.n_positions or MANY)
    text = served.text
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "unrolled",
        "unrolled": {
            "digest": served.digest,
            "kind": "text" if served.shape is None else "image",
            "shape": served.shape,
            "levels": None if served.shape is None else served.vocab_size,  # of a pixel, or of a colour
            "state_bytes": empty,
            "state_bytes_per_token": (served.engine.state_bytes(many) - empty) // many,
            "max_model_len": served.n_positions,
            "chat": text is not None and text.chat_template is not None,
            **{name: served.description.get(name) for name in ("mechanisms", "parameters", "weights")},
        },
    }
