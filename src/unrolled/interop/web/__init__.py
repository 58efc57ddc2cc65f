"""Web pages that run trained models: a self-contained folder for any static server.

index.html, *.js, *.css     the page
runtime/                    ONNX Runtime for browsers, as published on npm, with its licences
models/<name>/              the files that `unrolled.interop.onnx.export` writes
models.json                 the models, and which of them are shown side by side
"""

from unrolled.interop.web.runtime import runtime_files
from unrolled.interop.web.site import is_current_page_of, is_page_of, write_site

__all__ = ["is_current_page_of", "is_page_of", "runtime_files", "write_site"]
