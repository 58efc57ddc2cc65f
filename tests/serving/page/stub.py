"""A stand-in for the server: it answers as the real one does, with text and images that depend on the request alone."""

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unrolled.serving.page_files import TYPES, page_files

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
TALE = (
    "and the king said to them that all ships in that harbour were his own so they went down to the sea again"
)
WORDS = TALE.split()
LEVELS, SIDE = 17, 8
DRAWING = {"model", "temperature", "top_p", "top_k", "seed", "stream", "state", "keep", "n"}
WRITING = DRAWING | {"min_p", "max_tokens", "stream_options"}
FIELDS = {
    "/v1/completions": WRITING | {"prompt"},
    "/v1/chat/completions": WRITING | {"messages"},
    "/v1/images/completions": DRAWING | {"pixels", "rows", "response_format"},
}


def tokens(text: str) -> list[str]:
    """Split a text into tokens: words with the space after them."""
    return re.findall(r"\S+\s*|\s+", text)


def describe(kind: str, digit: str, chat: bool = False, per_token: int = 0) -> dict[str, Any]:
    shape = [SIDE, SIDE] if kind == "image" else None
    return {
        "digest": digit * 64, "kind": kind, "shape": shape, "levels": LEVELS if shape else None,
        "state_bytes": 0 if per_token else 135_168, "state_bytes_per_token": per_token, "max_model_len": None,
        "chat": chat, "mechanisms": ["softmax" if per_token else "linear"], "parameters": 3_291_136, "weights": "int8",
    }  # fmt: skip


MODELS = {
    "book": describe("text", "a"),
    "talker": describe("text", "b", chat=True),
    "softmax": describe("text", "c", per_token=8192),
    "digits": describe("image", "d"),
}


class Stub:
    """What the server knows, and what a test makes it do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, tuple[str, str]] = {}  # id -> digest of the model and text so far
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.key: str | None = None
        self.pause = 0.0  # seconds between chunks
        self.breaks_after: int | None = None  # chunks, after which the connection is closed
        self.error_after: int | None = None  # chunks, after which the stream holds an error
        self.models = list(MODELS)

    def keep(self, digest: str, text: str) -> str:
        key = hashlib.sha256(f"{digest} {text}".encode()).hexdigest()
        self.states[key] = digest, text
        return key

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for _, at, body in self.requests if at == path]


def state_file(key: str, digest: str, text: str) -> bytes:
    """Write a state as safetensors, with the text for a tensor."""
    content = text.encode()
    header = {
        "__metadata__": {"model": digest, "length": str(len(tokens(text))), "pending": "1", "id": key},
        "text": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]},
    }
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + content


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if kind in TYPES.values():
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def tell(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        self.tell({"error": error}, status)

    def opened(self) -> bool:
        if self.stub.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        self.refuse(401, "The key is missing or wrong.", "invalid_api_key")
        return False

    def do_GET(self) -> None:
        files = page_files()
        name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
        if name in files:
            return self.answer(200, files[name].read_bytes(), TYPES[files[name].suffix])
        if not self.opened():
            return None
        if self.path == "/v1/models":
            return self.tell({"object": "list", "data": [self.model(name) for name in self.stub.models]})
        key = self.path.removeprefix("/v1/states/")
        if key not in self.stub.states:
            return self.refuse(404, f"There is no state {key[:8]}.", "unknown_state")
        return self.answer(200, state_file(key, *self.stub.states[key]), "application/octet-stream")

    def model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "x", "unrolled": MODELS[name]}

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        end = 8 + int.from_bytes(content[:8], "little")
        digest = json.loads(content[8:end])["__metadata__"]["model"]
        key = self.stub.keep(digest, content[end:].decode())
        self.stub.requests.append(("PUT", self.path, {}))
        if f"/v1/states/{key}" != self.path:
            return self.refuse(400, "The content is not that of this id.")
        return self.tell({"id": key}, 201)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.opened():
            return None
        with self.stub.lock:
            self.stub.requests.append(("POST", self.path, body))
        if unknown := set(body) - FIELDS[self.path]:
            return self.refuse(400, f"Unknown fields: {sorted(unknown)}.")
        if "state" in body and body["state"] not in self.stub.states:
            return self.refuse(404, f"There is no state {body['state'][:8]}.", "unknown_state")
        if self.path == "/v1/images/completions":
            return self.draw(body)
        return self.write(body)

    def write(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        before = self.stub.states[body["state"]][1] if "state" in body else ""
        asked = "".join(x["content"] + "\n" for x in body["messages"]) if chat else body["prompt"]
        if not before and not asked:
            return self.refuse(400, "The prompt is empty.")
        prompt = before + asked
        source = random.Random(prompt + str(body.get("seed", random.random())))
        written = [f" {source.choice(WORDS)}" for _ in range(body["max_tokens"])]
        digest = MODELS[body["model"]]["digest"]
        usage = {
            "prompt_tokens": len(tokens(prompt)), "completion_tokens": len(written),
            "total_tokens": len(tokens(prompt)) + len(written),
            "prompt_tokens_details": {"cached_tokens": len(tokens(before))},
        }  # fmt: skip
        state = self.stub.keep(digest, prompt + "".join(written)) if body.get("keep") else None
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(written), "finish_reason": "length"}
            return self.tell({"choices": [choice], "state": state, "usage": usage})

        def chunk(text: str, finish: str | None) -> dict[str, Any]:
            part = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **part, "finish_reason": finish}]}

        chunks = [chunk("".join(written[i : i + 2]), None) for i in range(0, len(written), 2)]
        chunks.append(chunk("", "length") | {"state": state})
        chunks.append({"choices": [], "usage": usage})
        return self.send(chunks)

    def draw(self, body: dict[str, Any]) -> None:
        given = body["pixels"]
        if not all(isinstance(x, int) and 0 <= x < LEVELS for x in given):
            return self.refuse(400, "A pixel is no grey level.")
        source = random.Random(str(given))
        chunks: list[dict[str, Any]] = []
        for row in range(len(given) // SIDE, SIDE):
            for i in range(body["n"]):
                pixels = [min(LEVELS - 1, abs(x - row - i % 3) * source.randint(2, 6)) for x in range(SIDE)]
                chunks.append({"object": "image.completion.chunk", "data": [{"index": i, "pixels": pixels}]})
        usage = {"prompt_tokens": len(given), "completion_tokens": (SIDE * SIDE - len(given)) * body["n"]}
        chunks.append({"data": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}})
        return self.send(chunks)

    def send(self, chunks: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for i, chunk in enumerate(chunks):
                if self.stub.breaks_after == i:
                    return None
                if self.stub.error_after == i:
                    error = {"message": "The server is stopping.", "code": "stopping"}
                    return self.emit({"error": error})
                self.emit(chunk)
                time.sleep(self.stub.pause)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the person has stopped it

    def emit(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def stub_server() -> Iterator[tuple[str, Stub]]:
    """Run the server on a free port of this machine; give its address and what it knows."""
    stub = Stub()
    handler = type("Bound", (Handler,), {"stub": stub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", stub
        finally:
            server.shutdown()
            thread.join()
