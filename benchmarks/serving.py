"""Measure `unrolled serve` in its own process, with clients on the loopback interface.

    python benchmarks/serving.py throughput    # 1 to 64 clients, compared with the plan without a server
    python benchmarks/serving.py context       # tokens per second after long prompts, compared with softmax
    python benchmarks/serving.py prompt        # how much a long prompt delays the other requests
    python benchmarks/serving.py sessions      # 10,000 stored states, and the time to continue a state
    python benchmarks/serving.py memory        # resident memory over 100,000 requests
    python benchmarks/serving.py failures      # one of two server processes is killed with SIGKILL, ten times

The models have 4 blocks of width 256, random weights, and bytes as tokens. They are stored in runs/serving.
--attention names the mechanism, by default `linear`. The server runs the model on one thread.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from unrolled.bench import report
from unrolled.data import Vocabulary
from unrolled.decode import plan
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.processor import description

OUT = Path("runs/serving")
MODELS: dict[int, str] = {}  # the name of the model at each port
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def table(header: list[str], rows: list[list[object]]) -> str:
    return report.table(header, [[str(cell) for cell in row] for row in rows])


def model_folder(attention: str) -> Path:
    folder = OUT / attention
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        options = {"attention": attention, "positions": "rotary"}
        model = Decoder(DecoderConfig(vocab_size=256, d_model=256, n_layers=4, n_heads=8, **options))
        Vocabulary(kind="text").attach(model).save(folder)
    return folder


class Server:
    """A server process on a free port."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            sys.executable,
            "-m",
            "unrolled",
            "serve",
            str(folder),
            "--port",
            str(self.port),
            *options,
        ]
        self.start()

    def start(self) -> None:
        log = (OUT / f"server-{self.port}.log").open("a")
        self.process = subprocess.Popen(self.command, env=ENVIRONMENT, stderr=log, stdout=log)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: see {log.name}")
            time.sleep(0.1)
        raise RuntimeError("the server did not start in a minute")

    def memory(self) -> int:
        """Return the resident memory of the server in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@contextmanager
def server(folder: Path, *options: str):
    made = Server(folder, *options)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.kill(signal.SIGTERM)


async def stream(port: int, path: str, **body: object) -> AsyncIterator[dict]:
    """Post a request and yield the chunks of its stream, with little work in the client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    content = json.dumps({"stream": True, **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    writer.write(head.encode() + content)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ConnectionError(chunk["error"]["message"])
                yield chunk
        raise ConnectionError("the stream broke")
    finally:
        writer.close()


async def completion(port: int, prompt: object, tokens: int, **options: object) -> dict:
    """Run a completion; return its text, state, usage and start, and time and tokens of each chunk."""
    began, times, text, last = time.perf_counter(), [], "", {}
    usage, counts = {"include_usage": True, "continuous_usage_stats": True}, []
    asked = {
        "model": MODELS[port],
        "prompt": prompt,
        "max_tokens": tokens,
        "stream_options": usage,
        **options,
    }
    async for chunk in stream(port, "/v1/completions", **asked):
        if chunk["choices"]:
            if chunk["choices"][0]["text"]:
                times.append(time.perf_counter())
                counts.append(chunk["usage"]["completion_tokens"])
            text += chunk["choices"][0]["text"]
        last = {**last, **{key: value for key, value in chunk.items() if value is not None}}
    return {
        "text": text,
        "state": last.get("state"),
        "usage": last["usage"],
        "times": times,
        "counts": counts,
        "began": began,
    }


def drawn_alone(folder: Path, rows: int, tokens: int = 300) -> float:
    """Measure the tokens per second that the plan generates for this number of rows, without a server."""
    torch.set_num_threads(1)
    p = plan(Decoder.load(folder))
    p.generate([[1]] * rows, 30, seed=0)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        p.generate([[1]] * rows, tokens, seed=0)
        rates.append(rows * tokens / (time.perf_counter() - began))
    return statistics.median(rates)


def stepped(folder: Path, rows: int, steps: int = 200) -> float:
    """Measure the tokens per second of `plan.step`, without sampling, for this number of rows."""
    torch.set_num_threads(1)
    p = plan(Decoder.load(folder))
    state, token = p.init_state(rows), torch.zeros(rows, dtype=torch.long)
    rates = []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(steps):
            _, state = p.step(token, state, in_place=True)
        rates.append(rows * steps / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def throughput(attention: str) -> None:
    folder = model_folder(attention)
    rows = []
    with server(folder, "--states", "memory:") as running:
        MODELS[running.port] = attention

        async def all_of(clients: int, tokens: int) -> float:
            began = time.perf_counter()
            prompts = (f"client {i}: " for i in range(clients))
            found = await asyncio.gather(*(completion(running.port, p, tokens, seed=1) for p in prompts))
            return sum(x["usage"]["completion_tokens"] for x in found) / (time.perf_counter() - began)

        for clients in (1, 8, 32, 64):
            asyncio.run(all_of(clients, 100))
            served = statistics.median(asyncio.run(all_of(clients, 3000)) for _ in range(5))
            step, drawn = stepped(folder, clients), drawn_alone(folder, clients)
            rows.append(
                [
                    clients,
                    f"{served:,.0f}",
                    f"{step:,.0f}",
                    f"{drawn:,.0f}",
                    f"{served / step:.2f}",
                    f"{served / drawn:.2f}",
                ]
            )
    print(
        table(
            ["clients", "served, tokens/s", "`plan.step`", "drawn in C++", "of the step", "of drawing"], rows
        )
    )


def context(attention: str) -> None:
    """Print the tokens per second of 8 clients after a long prompt, with this mechanism and with softmax."""
    rows, clients = [], 8
    for name in (attention, "softmax"):
        with server(model_folder(name), "--states", "memory:", "--memory", "8GB") as running:
            MODELS[running.port] = name
            for length in (4_096, 16_384):
                texts = ["".join(random.Random(i).choices("abcdefgh ", k=length)) for i in range(clients)]

                found = asyncio.run(all_of(running.port, texts, 4_000 if name == attention else 2_000))
                begin, end = max(x["times"][0] for x in found), min(x["times"][-1] for x in found)
                drawn = sum(between(x, begin, end) for x in found)
                rows.append([name, f"{length:,}", f"{drawn / (end - begin):,.0f}"])
    print(table(["8 clients", "tokens before", "tokens/s"], rows))


async def all_of(port: int, texts: list[str], tokens: int) -> list[dict]:
    return await asyncio.gather(*(completion(port, text, tokens, seed=1) for text in texts))


def between(found: dict, begin: float, end: float) -> int:
    """Return how many tokens came after the chunk at time `begin`, up to the chunk at time `end`."""
    counts = [n for t, n in zip(found["times"], found["counts"], strict=True) if begin <= t <= end]
    return counts[-1] - counts[0] if counts else 0


def prompt(attention: str) -> None:
    folder = model_folder(attention)
    text = "".join(random.Random(0).choices("abcdefgh ", k=16_384))
    with server(folder, "--states", "memory:") as running:
        MODELS[running.port] = attention

        async def measure() -> tuple[list[float], list[float], float]:
            others = [asyncio.create_task(completion(running.port, f"{i}", 4000, seed=i)) for i in range(31)]
            await asyncio.sleep(2)
            began = time.perf_counter()
            long = await completion(running.port, text, 1)
            ended = time.perf_counter()
            found = await asyncio.gather(*others)
            before, during = [], []
            for other in found:
                times = other["times"]
                for a, b in pairwise(times):
                    (during if b > began and a < ended else before).append(b - a)
            return before, during, long["times"][0] - began

        before, during, first = asyncio.run(measure())
        rows = [
            [
                name,
                len(gaps),
                *(f"{1000 * x:.1f}" for x in (statistics.median(gaps), quantile(gaps, 0.99), max(gaps))),
            ]
            for name, gaps in (("without", before), ("while it is read", during))
        ]
        print(table(["31 streams beside a prompt of 16,384", "gaps", "median, ms", "p99", "largest"], rows))
        print(f"\nIts first token came after {first:.2f} s.")


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def sessions(attention: str) -> None:
    folder, count, store = model_folder(attention), 10_000, OUT / "sessions.sqlite"
    for old in OUT.glob("sessions.sqlite*"):
        old.unlink()
    texts = ["".join(random.Random(i).choices("abcdefgh ", k=15_000)) for i in range(20)]
    with server(folder, "--states", str(store), "--queue", "512") as running:
        MODELS[running.port] = attention
        idle = running.memory()
        long = [asyncio.run(completion(running.port, text, 1, keep=True))["state"] for text in texts]

        async def keep_all() -> list[str]:
            gate = asyncio.Semaphore(32)

            async def one(i: int) -> str:
                async with gate:
                    return (await completion(running.port, f"session {i}", 2, keep=True))["state"]

            return await asyncio.gather(*(one(i) for i in range(count)))

        began = time.perf_counter()
        ids = asyncio.run(keep_all())  # these sessions push the long ones out of the memory of the store
        took = time.perf_counter() - began
        held = running.memory()
        print(
            f"{len(set(ids)):,} sessions in {took:.0f} s: {store.stat().st_size / 1e9:.2f} GB in SQLite, "
            f"{held / 1e9:.2f} GB resident, {idle / 1e9:.2f} GB before\n"
        )
        rows = [["from the store", *times(running.port, long)], ["from memory", *times(running.port, long)]]
    with server(folder, "--states", str(store)) as running:
        MODELS[running.port] = attention
        asyncio.run(completion(running.port, "warm up", 2, keep=True))
        rows.append(["from the store, in a new process", *times(running.port, long)])
    print(table(["sessions of 15,001 tokens", "first token, ms", "lowest", "highest", "cached"], rows))


def times(port: int, states: list[str]) -> list[str]:
    """Continue states; return median, lowest and highest time to the first token, and the cached tokens."""
    found = [asyncio.run(completion(port, " and", 1, state=state)) for state in states]
    taken = [1000 * (x["times"][0] - x["began"]) for x in found]
    usage = found[0]["usage"]
    cached = f"{usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']}"
    return [*(f"{x:.2f}" for x in (statistics.median(taken), min(taken), max(taken))), cached]


def memory(attention: str, requests: int) -> None:
    folder = model_folder(attention)
    for old in OUT.glob("memory.sqlite*"):
        old.unlink()
    bounds = ("--state-bytes", "200MB", "--state-memory", "64MB")
    with server(folder, "--states", str(OUT / "memory.sqlite"), *bounds) as running:
        MODELS[running.port] = attention

        async def some(numbers: range) -> None:
            gate = asyncio.Semaphore(32)

            async def one(i: int) -> None:
                async with gate:
                    await completion(running.port, f"request {i} of many", 4, keep=True, seed=i)

            await asyncio.gather(*(one(i) for i in numbers))

        began, rows, tenth = time.perf_counter(), [], requests // 10
        for part in range(10):
            asyncio.run(some(range(part * tenth, (part + 1) * tenth)))
            rows.append(
                [
                    f"{(part + 1) * tenth:,}",
                    f"{running.memory() / 1e6:.0f}",
                    f"{time.perf_counter() - began:.0f}",
                ]
            )
        print(table(["requests", "resident MB", "seconds"], rows))


def failures(attention: str, rounds: int = 10, clients: int = 16) -> None:
    """Run two processes with one store, and kill one of them in each round while it generates."""
    folder, store = model_folder(attention), OUT / "failures.sqlite"
    for old in OUT.glob("failures.sqlite*"):
        old.unlink()
    turns, tokens = 6, 400
    pair = [Server(folder, "--states", str(store)) for _ in range(2)]
    for running in pair:
        MODELS[running.port] = attention

    async def conversation(client: int, broken: list[float], gaps: list[float]) -> tuple[str, str | None]:
        """Run turns that each continue the last state; a failed turn is sent again to the other process."""
        text, state, where = "", None, client % 2
        for turn in range(turns):
            while True:
                began = time.perf_counter()
                try:
                    found = await completion(
                        pair[where].port,
                        f"client {client} turn {turn}: ",
                        tokens,
                        seed=turn,
                        state=state,
                        keep=True,
                    )
                    break
                except (ConnectionError, OSError, asyncio.IncompleteReadError):
                    broken.append(time.perf_counter() - began)
                    where = 1 - where
                    if len(broken) > 1000:
                        raise
            if broken:
                gaps.append(found["times"][0] - began)
            text, state = text + found["text"], found["state"]
        return text, state

    async def all_of(kill: Server | None) -> tuple[list[tuple[str, str | None]], int, float]:
        broken, gaps = [], []
        tasks = [asyncio.create_task(conversation(i, broken, gaps)) for i in range(clients)]
        if kill is not None:
            await asyncio.sleep(random.uniform(0.2, 1.0))
            kill.kill()
        return await asyncio.gather(*tasks), len(broken), max(gaps, default=0)

    try:
        expected, _, _ = asyncio.run(all_of(None))
        rows = []
        for number in range(rounds):
            killed = pair[number % 2]
            found, failed, gap = asyncio.run(all_of(killed))
            same_text = sum(a[0] == b[0] for a, b in zip(expected, found, strict=True))
            same_state = sum(a[1] == b[1] for a, b in zip(expected, found, strict=True))
            began = time.perf_counter()
            killed.start()
            rows.append(
                [
                    number + 1,
                    failed,
                    same_text,
                    same_state,
                    f"{gap:.2f}",
                    f"{time.perf_counter() - began:.1f}",
                ]
            )
        print(
            table(
                [
                    "kill",
                    "failed requests",
                    "equal texts",
                    "equal states",
                    "longest wait for a token, s",
                    "back after, s",
                ],
                rows,
            )
        )
    finally:
        for running in pair:
            if running.process.poll() is None:
                running.kill(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["throughput", "context", "prompt", "sessions", "memory", "failures"])
    parser.add_argument("--attention", default="linear")
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    [processor] = re.findall(r"model name\s*: (.*)", description())[:1] or ["unknown processor"]
    print(f"{processor}, {time.strftime('%F')}, {arguments.attention}\n")
    if arguments.what == "memory":
        memory(arguments.attention, arguments.requests)
    else:
        cases = (throughput, context, prompt, sessions, failures)
        {case.__name__: case for case in cases}[arguments.what](arguments.attention)


if __name__ == "__main__":
    main()
