"""Talk to a server through OpenAI's client, fork a session, and move the session to another server.

    pip install '.[serve]' openai
    python examples/serving.py

Two servers run on this machine, each with its own store, as if they were two machines. Both serve the small
model that comes with the library. This model continues texts in the style of Shakespeare's plays, and answers
no questions.
"""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx2 as httpx
from openai import OpenAI


@contextmanager
def server():
    """Run a server; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "unrolled", "serve", "--demo", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/ready").raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def say(client, line, state=None):
    """Print and return the model's continuation of a line, and return the state after it."""
    options = {"keep": True} | ({} if state is None else {"state": state})
    answer = client.completions.create(
        model="text", prompt=line, max_tokens=200, temperature=0.7, seed=1, stop="\n\n", extra_body=options
    )
    details = answer.usage.prompt_tokens_details
    print(f"{line.strip()}\n{answer.choices[0].text}")
    print(f"    [{details.cached_tokens} of {answer.usage.prompt_tokens} tokens were not read again]\n")
    return answer.choices[0].text, answer.state


with server() as here, server() as there:
    client, other = (OpenAI(base_url=url, api_key="none") for url in (here, there))

    print("--- a chat\n")
    _, state = say(client, "ROMEO:\n")
    _, state = say(client, "\n\nJULIET:\n", state)

    print("--- a fork: the same state continued in two ways\n")
    one, _ = say(client, "\n\nROMEO:\n", state)
    two, _ = say(client, "\n\nNURSE:\n", state)

    print("--- the session moves to the other server, as a file\n")
    file = httpx.get(f"{here}/states/{state}").content
    httpx.put(f"{there}/states/{state}", content=file).raise_for_status()
    print(f"{len(file):,} bytes\n")
    moved, _ = say(other, "\n\nROMEO:\n", state)
    assert moved == one  # the other server writes the same continuation
