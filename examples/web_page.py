"""Train a linear and a softmax model on a text, and write a web page that runs both in the browser.

    pip install '.[onnx]'
    python examples/web_page.py

Both models are trained for only a few seconds, on a text that the script creates. The first page written on
a machine needs npm, which downloads ONNX Runtime for browsers. The script deletes its page at the end. To
open a page, write it to a folder that stays, and serve that folder:
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
            "model.positions": "rotary",  # these positions set no limit to the length of a text
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
