"""The files of the server's page: its own, and those that it shares with the page of exported models."""

from pathlib import Path

PAGE = Path(__file__).parent / "page"
WEB = Path(__file__).parents[1] / "web"
SHARED = ("icon.svg", "pad.js", "pictures.js")
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files() -> dict[str, Path]:
    """Return the files by name; the server has index.html at `/` and the other files at `/page/NAME`."""
    own = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}
    return own | {name: WEB / name for name in SHARED}
