"""/v1/states and /v1/sessions: states as files, and names that point to them."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from starlette.responses import JSONResponse, Response

from unrolled.serving.model import Served
from unrolled.serving.protocol.answers import Session, StateInfo, answers
from unrolled.serving.protocol.errors import ApiError, invalid
from unrolled.serving.protocol.sessions import SessionRequest
from unrolled.serving.service import check_last, service_of
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.states import UnknownState
from unrolled.serving.store.checks import DIGEST

router = APIRouter()
Id = Annotated[str, Path(pattern=f"^{DIGEST.pattern}$", description="the id of a state")]
Name = Annotated[str, Path(pattern="^[A-Za-z0-9._:-]{1,128}$", description="the name of a session")]
FILE = "application/octet-stream"


@router.get("/v1/states/{id}", response_class=Response, responses={200: {"content": {FILE: {}}}})
async def download(id: Id, request: Request) -> Response:
    """Return a state as a safetensors file."""
    snapshot = await service_of(request).snapshot(id)
    content = await asyncio.to_thread(snapshot.to_bytes)
    return Response(content, media_type=FILE, headers={"etag": f'"{id}"'})


@router.put("/v1/states/{id}", status_code=201, responses=answers(StateInfo, 200, 201))
async def upload(id: Id, request: Request) -> Response:
    """Store a state; the status is 201 if it is new, and 200 if it was there already."""
    service, content = service_of(request), await request.body()
    try:
        snapshot = await asyncio.to_thread(Snapshot.of_bytes, content, id)
    except ValueError as error:
        raise invalid(f"the body is not the state {id}: {error}", "state", "damaged_state") from None
    for served in service.models.values():
        if served.digest == snapshot.model:
            await asyncio.to_thread(_check, snapshot, served)
            break
    else:
        raise invalid(f"the state {id} is not of a model that is served", "state", "foreign_state")
    known = await service.stored(service.states.__contains__, id)
    await service.keep(snapshot)
    return JSONResponse({"id": id, "object": "state", "length": snapshot.length}, 200 if known else 201)


@router.delete("/v1/states/{id}", response_class=Response, status_code=204)
async def delete(id: Id, request: Request) -> Response:
    """Delete a state."""
    if not await service_of(request).stored(service_of(request).states.delete, id):
        raise ApiError(404, f"there is no state {id}", param="id", code="unknown_state")
    return Response(status_code=204)


@router.get("/v1/sessions/{name}", responses=answers(Session))
async def session(name: Name, request: Request) -> Response:
    """Return the state that a session points to."""
    found = await service_of(request).stored(service_of(request).states.session, name)
    if found is None:
        raise ApiError(404, f"there is no session {name}", param="name", code="unknown_session")
    return _pointer(name, found)


@router.put("/v1/sessions/{name}", responses=answers(Session))
async def move(
    name: Name,
    body: SessionRequest,
    request: Request,
    if_match: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Point a session to another state, unless another client has moved it in the meantime."""
    if if_none_match is not None and if_none_match.strip() != "*":
        raise invalid("the header If-None-Match must be *, for a session that is new", "If-None-Match")
    if if_none_match is None and if_match is None:
        raise ApiError(
            428,
            'a session moves with If-Match: "ID of its state", or If-None-Match: * if it is new',
            param="If-Match",
        )
    if if_none_match is not None and if_match is not None:
        raise invalid("If-Match and If-None-Match exclude each other: send one of them", "If-Match")
    await _swap(request, name, None if if_match is None else _tag(if_match), body.state)
    return _pointer(name, body.state)


@router.delete("/v1/sessions/{name}", response_class=Response, status_code=204)
async def forget(name: Name, request: Request, if_match: Annotated[str | None, Header()] = None) -> Response:
    """Delete a session, unless another client has moved it in the meantime; its states stay."""
    if if_match is None:
        raise ApiError(428, 'a session is dropped with If-Match: "ID of its state"', param="If-Match")
    await _swap(request, name, _tag(if_match), None)
    return Response(status_code=204)


def _check(snapshot: Snapshot, served: Served) -> None:
    """Refuse a state that has the digest of a model, but cannot be a state of this model."""
    check_last(snapshot, served)
    try:
        served.engine.runner.state(snapshot.tensors, snapshot.length - 1)
    except (ValueError, MemoryError, RuntimeError) as error:
        raise invalid(
            f"the state {snapshot.id} does not fit its model: {error}", "state", "damaged_state"
        ) from None


async def _swap(request: Request, name: str, expected: str | None, new: str | None) -> None:
    moved = False
    if expected is None or DIGEST.fullmatch(expected):  # no session points to anything else
        try:
            moved = await service_of(request).stored(service_of(request).states.move, name, expected, new)
        except UnknownState:
            raise ApiError(404, f"there is no state {new}", param="state", code="unknown_state") from None
    if not moved and expected is None:
        raise ApiError(412, f"the session {name} exists already", param="If-None-Match", code="moved")
    if not moved:
        says = f"the session {name} does not exist, or points elsewhere now"
        raise ApiError(412, says, param="If-Match", code="moved")


def _tag(header: str) -> str:
    tag = header.strip()
    if len(tag) < 2 or tag[0] != '"' or tag[-1] != '"':
        raise invalid('the header If-Match must be the id of a state in quotes, "ID"', "If-Match")
    return tag[1:-1]


def _pointer(name: str, state: str) -> Response:
    return JSONResponse({"name": name, "state": state}, headers={"etag": f'"{state}"'})
