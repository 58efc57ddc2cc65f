"""/tokenize, /detokenize and /tokenizer_info, so that a client needs no tokenizer of its own."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.model import Served
from unrolled.serving.protocol.answers import Detokenized, Tokenized, TokenizerInfo, answers
from unrolled.serving.protocol.errors import invalid
from unrolled.serving.protocol.tokens import DetokenizeRequest, TokenizeRequest
from unrolled.serving.routes.continuing import check_ids, encode
from unrolled.serving.service import service_of
from unrolled.serving.text import Text

router = APIRouter()


@router.post("/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the ids of a text, without a start symbol."""
    served = service_of(request).model(body.model)
    text = _text(served)
    ids = await encode(text, body.prompt, "prompt")
    check_ids(ids, served.vocab_size, "prompt")
    strings = [text.piece(id) for id in ids] if body.return_token_strs else None
    found = {"count": len(ids), "max_model_len": served.n_positions, "tokens": ids, "token_strs": strings}
    return JSONResponse(found)


@router.post("/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of ids."""
    served = service_of(request).model(body.model)
    ids = check_ids(body.tokens, served.vocab_size, "tokens")
    return JSONResponse({"prompt": _text(served).decode(ids)})


@router.get("/tokenizer_info", responses=answers(TokenizerInfo))
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """Return the properties of a tokenizer, such as its special tokens and its chat template."""
    served = service_of(request).model(model)
    text = _text(served)
    return JSONResponse(
        {
            "tokenizer_class": type(text).__name__,
            "vocab_size": served.vocab_size,
            "model_max_length": served.n_positions,
            "chat_template": text.chat_template,
            **text.special_tokens,
        }
    )


def _text(served: Served) -> Text:
    if served.text is None:
        raise invalid(f"the model {served.name} draws images: it has no text", "model")
    return served.text
