"""The page at /, and its files."""

import os

from fastapi import FastAPI
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from unrolled.serving.page_files import page_files

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the files of the page at /page, and its index.html at /."""
    files = _Files(check_dir=False)
    app.mount("/page", files)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """Return the page."""
        return await files.get_response("index.html", {"type": "http", "method": "GET", "headers": []})


class _Files(StaticFiles):
    """Files with headers that forbid the page to load anything from other servers."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        found = page_files().get(path)
        return ("", None) if found is None else (str(found), found.stat())

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
