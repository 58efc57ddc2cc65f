"""A linear and a softmax model of one text on a web page: trained, and written with all that the page needs.

    python examples/web_page.py

Both are trained only for a moment, on a text that is made here. The first page ever written fetches ONNX
Runtime for browsers through npm. To see the page, write it to a folder that stays, and serve that:
`python -m http.server --bind 127.0.0.1 --directory page`.
"""

import json
import tempfile
from pathlib import Path

from unrolled.cli import app
from unrolled.interop.web import write_site

VERSE = "Attention reads a sequence as a whole;\na state reads on, one letter at a time.\n"

with tempfile.TemporaryDirectory() as folder:
    text, page = Path(folder, "verse.txt"), Path(folder, "page")
    text.write_text(VERSE * 200)
    runs = {}
    for attention in ("linear", "softmax"):
        runs[attention] = Path(folder, attention)
        settings = {
            "data.name": "text",
            "data.path": text,
            "data.length": 64,
            "model.attention": attention,
            "model.d_model": 32,
            "model.n_layers": 2,
            "model.n_heads": 2,
            "model.positions": "rotary",  # a text may go on for longer than any table of positions
            "train.steps": 30,
            "run_dir": runs[attention],
        }
        # As on the command line: `unrolled train data.name=text ...`
        app(["train", *(f"{name}={value}" for name, value in settings.items())], standalone_mode=False)

    write_site(runs, page)  # or `unrolled export linear softmax page --web`
    size = sum(path.stat().st_size for path in page.rglob("*") if path.is_file())
    print(f"a page of {size / 1e6:.0f} MB that needs no other host")
    for model in json.loads(Path(page, "models.json").read_text()):
        print(f"{model['group']}: {model['title']}, {model['bytes']:,} bytes")
