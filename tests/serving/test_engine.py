"""The engine gives every job what the model alone would give it, whatever else it does."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace

import pytest
import torch
from planned import MODELS, V, decoder, of

from unrolled.decode import plan
from unrolled.decode.batch import Drawing
from unrolled.decode.request import Request, Sampling
from unrolled.ops import native
from unrolled.ops.state import nbytes
from unrolled.serving import engine as engine_module
from unrolled.serving import jobs
from unrolled.serving.engine import Engine
from unrolled.serving.jobs import (
    BusyError,
    Drawn,
    EngineError,
    Finished,
    Job,
    Prompted,
    Run,
    StoppingError,
    TimedOutError,
    TokenLogprob,
    TooLargeError,
)
from unrolled.serving.reading import logprobs
from unrolled.serving.runner import PlanRunner
from unrolled.serving.snapshot import MOST, Snapshot
from unrolled.serving.unplanned import ModelRunner
from unrolled.serving.writing import Writing

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

DIGEST = "0" * 64
SAMPLING = Sampling(temperature=0.8, top_k=20)
RUNNERS = {"plan": lambda model: PlanRunner(plan(model)), "model": ModelRunner}


def made(model, kind="plan", **options):
    return Engine(RUNNERS[kind](model), digest=DIGEST, **options)


def job(model, prompt, limit, *, seed=0, n=1, sampling=SAMPLING, **options):
    """Return a job that draws what `generate` draws for the same arguments."""
    request = Request.of(model.config, [prompt], limit, seed=seed, num_samples=n)
    [tokens] = request.prompts
    keys = request.keys.tolist()
    return Job(tokens.tolist(), limit, sampling=sampling, keys=keys, **options)


async def result(run):
    """Return the tokens of each continuation, how each finished, and the first and the last event."""
    tokens, finish = {}, {}
    async for event in run:
        if isinstance(event, Prompted):
            first = event
        elif isinstance(event, Drawn):
            assert event.index not in finish, "nothing follows the end"
            tokens.setdefault(event.index, []).extend(event.tokens)
            if event.finish:
                finish[event.index] = event.finish
    assert isinstance(event, Finished)
    return tokens, finish, first, event


def on(engine, *jobs):
    """Run jobs side by side."""

    async def go():
        return await asyncio.gather(*(result(engine.submit(job)) for job in jobs))

    try:
        return asyncio.run(go())
    finally:
        engine.drain(5)


def expected(model, prompt, limit, *, seed=0, n=1, **options):
    drawn = plan(model).generate(
        [prompt], limit, seed=seed, num_samples=n, temperature=0.8, top_k=20, **options
    )
    return {index: row.tolist() for index, row in enumerate(drawn)}


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", ["linear", "softmax", "hybrid"])
def test_jobs_side_by_side_draw_what_each_draws_alone(name, kind):
    model = decoder(**MODELS[name])
    cases = [([1, 2, 3], 30, 0, 1), (list(range(40)), 5, 1, 3), ([4], 50, 2, 2), ([5] * 100, 1, 3, 1)]
    jobs = [job(model, prompt, limit, seed=seed, n=n) for prompt, limit, seed, n in cases]
    for (prompt, limit, seed, n), (tokens, finish, first, last) in zip(
        cases, on(made(model, kind, rows=5, chunk=16), *jobs), strict=True
    ):
        assert tokens == expected(model, prompt, limit, seed=seed, n=n)
        assert set(finish.values()) == {"length"}
        assert (first.cached, first.logprobs, last.snapshots) == (0, None, None)


@pytest.mark.parametrize("limit", [12, 30])
def test_a_job_ends_with_a_stop_sequence(limit):
    model = decoder()
    whole = expected(model, [1, 2], 30)[0]
    stop = whole[9:12]
    [(tokens, finish, _, _)] = on(made(model), job(model, [1, 2], limit, stops=[stop, [V - 1] * 9]))
    assert tokens == expected(model, [1, 2], 30, stop=[stop])
    assert finish == {0: "stop"}


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", ["linear", "softmax", "window"])
def test_a_snapshot_continues_as_if_nothing_had_happened(name, kind):
    model = decoder(**MODELS[name])
    engine = made(model, kind, chunk=8)
    prompt, more = list(range(20)), [7, 8, 9]

    async def go():
        first = await result(engine.submit(job(model, prompt, 12, keep=True)))
        again = await result(engine.submit(job(model, prompt, 12, keep=True)))
        [state] = first[3].snapshots
        assert again[3].snapshots == [state], "the same request gives the same state"
        assert again[2].cached == 19
        assert (state.length, state.pending) == (32, first[0][0][-1])
        whole = prompt + first[0][0] + more
        fresh = await result(engine.submit(job(model, whole, 9, seed=5, keep=True)))
        keys = Request.of(model.config, [whole], 9, seed=5).keys.tolist()
        second = Job(more, 9, state=state, sampling=SAMPLING, keys=keys, keep=True)
        continued = await result(engine.submit(second))
        forked = await result(engine.submit(second))
        assert continued[0] == fresh[0] == forked[0]
        assert continued[2].cached == state.length - 1
        assert continued[3].snapshots == forked[3].snapshots
        if kind == "plan":  # the model itself rounds by how many tokens it reads at once
            assert continued[3].snapshots == fresh[3].snapshots

    asyncio.run(go())
    engine.drain(5)


def test_a_job_that_draws_nothing_returns_the_state_of_its_prompt():
    model = decoder()
    prompt = list(range(20))
    engine = made(model)

    async def go():
        read = await result(engine.submit(job(model, prompt, 0, keep=True)))
        [state] = read[3].snapshots
        assert (state.length, state.pending, read[0]) == (20, 19, {})
        after = Job([], 10, state=state, sampling=SAMPLING, keys=job(model, [1], 1).keys)
        return await result(engine.submit(after))

    tokens, *_ = asyncio.run(go())
    engine.drain(5)
    assert tokens == expected(model, prompt, 10)


def test_what_follows_a_state_is_not_taken_for_the_beginning_of_a_prompt():
    model, more = decoder(), list(range(30, 50))
    engine = made(model)

    async def go():
        *_, finished = await result(engine.submit(job(model, list(range(20)), 0, keep=True)))
        [state] = finished.snapshots
        after = Job(more, 20, state=state, sampling=SAMPLING, keys=job(model, [1], 1).keys)
        tokens, *_ = await result(engine.submit(after))
        prompt = [state.pending, *more, *tokens[0], 1]
        fresh = await result(engine.submit(job(model, prompt, 20)))
        again, *_ = await result(engine.submit(after))
        return prompt, fresh, tokens, again

    prompt, fresh, tokens, again = asyncio.run(go())
    engine.drain(5)
    assert fresh[2].cached == 0
    assert fresh[0] == expected(model, prompt, 20)
    assert tokens == again == expected(model, [*range(20), *more], 20)


@pytest.mark.parametrize("limit", [0, 6])
def test_logprobs_are_those_of_the_model(limit):
    model = decoder()
    prompt = list(range(3, 40))
    asked = job(model, prompt, limit, logprobs=2, prompt_logprobs=True)
    [(tokens, _, first, _)] = on(made(model, chunk=8), asked)
    drawn = tokens.get(0, [])
    with torch.no_grad():
        exact = model.double()(torch.tensor([prompt + drawn])).log_softmax(-1)[0]
    assert first.logprobs[0] is None
    assert [x.token for x in first.logprobs[1:]] == prompt[1:]
    for place, told in enumerate(first.logprobs[1:]):
        assert told.logprob == pytest.approx(exact[place, prompt[place + 1]].item(), abs=1e-5)
        assert [token for token, _ in told.top] == exact[place].topk(2).indices.tolist()
        assert told.top[0][1] == pytest.approx(exact[place].max().item(), abs=1e-5)


def test_logprobs_of_new_tokens_are_those_of_the_model():
    model = decoder()
    engine, found = made(model), []

    async def go():
        async for event in engine.submit(job(model, [1, 2], 40, logprobs=1)):
            if isinstance(event, Drawn):
                assert len(event.tokens) == len(event.logprobs)
                found.extend(event.logprobs)

    asyncio.run(go())
    engine.drain(5)
    tokens = [x.token for x in found]
    assert tokens == expected(model, [1, 2], 40)[0]
    with torch.no_grad():
        exact = model.double()(torch.tensor([[1, 2, *tokens]])).log_softmax(-1)[0, 1:]
    for place, told in enumerate(found):
        assert told.logprob == pytest.approx(exact[place, told.token].item(), abs=1e-5)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", ["linear", "softmax", "window"])
@pytest.mark.parametrize("kept", [1, 2, 7, 13, 14])
def test_a_watch_ends_a_continuation_and_its_state_is_that_of_the_kept_tokens(kind, name, kept):
    model = decoder(**MODELS[name])
    engine, drawn = made(model, kind), []

    def watch(index, tokens):
        drawn.extend(tokens)
        return None if len(drawn) < 20 + kept else len(tokens) - (len(drawn) - 20 - kept)

    async def go():
        ended = await result(engine.submit(job(model, [1, 2], 400, watch=watch, keep=True)))
        exact = await result(engine.submit(job(model, [1, 2], 20 + kept, keep=True)))
        return ended, exact

    ended, exact = asyncio.run(go())
    engine.drain(5)
    assert ended[0] == exact[0]
    assert ended[1] == {0: "stop"}
    assert ended[3].snapshots == exact[3].snapshots


def test_the_state_after_a_stop_text_is_not_kept_for_other_prompts(monkeypatch):
    monkeypatch.setattr("unrolled.serving.engine.BLOCK_SECONDS", 0.2)  # so that a block reads beyond the stop
    model, prompt, seen = decoder(), list(range(20)), []
    engine = made(model)

    def watch(index, tokens):
        seen.extend(tokens)
        return len(tokens) - (len(seen) - 9) if len(seen) >= 9 else None

    async def asked():
        tokens, *_ = await result(engine.submit(job(model, prompt, 400, watch=watch)))
        return (await result(engine.submit(job(model, [*prompt, *tokens[0], 1, 2], 8))))[2].cached

    cached = asyncio.run(asked())
    engine.drain(5)
    assert len(seen) > 9
    assert cached == 19  # what was read before the stop


def test_logprobs_of_a_prompt_that_was_read_before():
    model, prompt = decoder(), list(range(30))
    engine = made(model)
    asked = job(model, prompt, 1, logprobs=1, prompt_logprobs=True)

    async def twice():
        return [(await result(engine.submit(asked)))[2].logprobs for _ in range(2)]

    first, again = asyncio.run(twice())
    engine.drain(5)
    assert len(again) == len(first) == 30
    assert [x.token for x in again[1:]] == prompt[1:]


def test_a_repetition_penalty_counts_the_prompt():
    model = decoder()
    sampling = Sampling(temperature=0.8, top_k=20, repetition_penalty=1.5)
    [(tokens, *_)] = on(made(model), job(model, [1, 2, 3], 30, sampling=sampling))
    assert tokens == expected(model, [1, 2, 3], 30, repetition_penalty=1.5)


def test_a_repetition_penalty_does_not_count_what_a_state_has_read():
    model = decoder(tie_embeddings=True)  # it likes to repeat a token
    engine = made(model)
    greedy, penalty = Sampling(temperature=0), Sampling(temperature=0, repetition_penalty=1e6)

    async def first(token, sampling):
        kept = await result(engine.submit(Job([token], 0, keep=True)))
        [state] = kept[3].snapshots
        return (await result(engine.submit(Job([], 1, state=state, sampling=sampling))))[0][0]

    async def go(sampling):
        return [await first(token, sampling) for token in range(V)]

    assert asyncio.run(go(penalty)) == asyncio.run(go(greedy))
    engine.drain(5)


def test_prompts_begin_where_earlier_ones_part():
    model = decoder()
    engine, shared = made(model, chunk=16), list(range(40))
    prompts = [shared + [first] * 20 for first in (50, 51, 52)]

    async def go():
        return [(await result(engine.submit(job(model, prompt, 8)))) for prompt in prompts]

    results = asyncio.run(go())
    engine.drain(5)
    assert [first.cached for _, _, first, _ in results] == [0, 0, 40]
    for prompt, (tokens, *_) in zip(prompts, results, strict=True):
        assert tokens == expected(model, prompt, 8)
    assert engine.counts["cached"] == 40


def test_a_prompt_of_another_owner_is_read_again():
    model = decoder()
    engine = made(model)

    async def go():
        jobs = [job(model, list(range(30)), 1, owner=owner) for owner in ("a", "b", "a")]
        return [(await result(engine.submit(job)))[2].cached for job in jobs]

    cached = asyncio.run(go())
    engine.drain(5)
    assert cached == [0, 0, 29]


def reading_after(event, model, **options):
    """Make an engine that reads no prompt before an event."""

    class Runner(PlanRunner):
        def read(self, tokens, state, wanted):
            event.wait(10)
            return super().read(tokens, state, wanted)

    return Engine(Runner(plan(model)), digest=DIGEST, **options)


def test_short_prompts_are_read_before_the_next_block(monkeypatch):
    monkeypatch.setattr("unrolled.serving.engine.BLOCK_SECONDS", 10.0)
    model, submitted = decoder(), threading.Event()
    engine = reading_after(submitted, model)

    async def go():
        runs = [engine.submit(job(model, [n, 0], 1)) for n in range(20)]
        submitted.set()
        await asyncio.gather(*map(result, runs))

    asyncio.run(go())
    engine.drain(5)
    assert engine.counts["blocks"] <= 2  # the first prompt may have been read before the others came


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(monkeypatch):
    monkeypatch.setattr(engine_module, "BLOCK_SECONDS", 0.0)  # so that jobs are taken after every chunk
    model, submitted, order = decoder(), threading.Event(), []

    class Runner(PlanRunner):
        def read(self, tokens, state, wanted):
            submitted.wait(10)
            order.append(tokens.tolist()[0])
            return super().read(tokens, state, wanted)

    engine = Engine(Runner(plan(model)), digest=DIGEST, chunk=8)

    async def go():
        runs = [engine.submit(job(model, prompt, 1)) for prompt in ([1] * 80, [2, 0])]
        submitted.set()
        await asyncio.gather(*map(result, runs))

    asyncio.run(go())
    engine.drain(5)
    assert order.count(1) > 10
    assert order.index(2) <= 2  # a chunk may have been read before the short prompt came


def test_others_go_on_between_the_chunks_of_a_long_prompt(monkeypatch):
    monkeypatch.setattr(engine_module, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "MOST_EVENTS", 10**6)
    model, done = decoder(), []

    class Runner(PlanRunner):
        def read(self, tokens, state, wanted):
            done.append("read")
            return super().read(tokens, state, wanted)

    engine = Engine(Runner(plan(model)), digest=DIGEST, chunk=8)
    draw = engine._writing.draw
    monkeypatch.setattr(engine._writing, "draw", lambda most: done.append("draw") or draw(most))

    async def go():
        other = engine.submit(job(model, [1], 10**6))
        await anext(aiter(other))  # it is drawn from now on
        await result(engine.submit(job(model, [2] * 80, 1)))
        other.cancel()

    asyncio.run(go())
    engine.drain(5)
    assert done.count("read") > 10
    assert ("read", "read") not in itertools.pairwise(done)


def test_a_block_takes_about_as_long_however_long_a_token_takes(monkeypatch):
    engine, clock, asked = made(decoder()), [0.0], []

    def draw(most):
        asked.append(most)
        clock[0] += seconds * most
        return []

    monkeypatch.setattr(Writing, "waits", False)
    monkeypatch.setattr(engine._writing, "draw", draw)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: clock[0])
    for seconds in (0.001, 0.01, 1.0, 0.001):
        for _ in range(10):
            engine._draw()
        assert asked[-1] == 1 or 0.01 <= seconds * asked[-1] <= 0.02
    engine.drain(5)


@pytest.mark.parametrize("length", [2, 30])
def test_a_conversation_is_not_read_again(length):
    model = decoder()
    engine = made(model)

    async def go():
        tokens, *_ = await result(engine.submit(job(model, list(range(length)), 20)))
        return await result(engine.submit(job(model, [*range(length), *tokens[0], 1, 2], 4)))

    _, _, first, _ = asyncio.run(go())
    engine.drain(5)
    assert first.cached == length + 19


@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting"])
def test_cancelling_ends_the_iteration(waits, monkeypatch):
    model = decoder()
    engine = made(model, rows=1)
    monkeypatch.setattr(engine._writing, "draw", lambda most: [])  # no further event comes

    async def go():
        runs = [engine.submit(job(model, [1], 10)), engine.submit(job(model, [2], 10))]
        read = asyncio.create_task(result(runs[waits]))
        await asyncio.sleep(0.1)
        runs[waits].cancel()
        with pytest.raises(EngineError, match="given up"):
            await asyncio.wait_for(read, 5)
        runs[not waits].cancel()

    asyncio.run(go())
    engine.drain(5)


def test_cancelling_frees_the_rows():
    model = decoder()
    engine = made(model, rows=1)

    async def go():
        long = engine.submit(job(model, [1], 10**6))
        waiting = engine.submit(job(model, [2], 3))
        async for event in long:
            if isinstance(event, Drawn):
                break
        began = time.monotonic()
        long.cancel()
        tokens, *_ = await result(waiting)
        assert time.monotonic() - began < 0.5
        return tokens

    assert asyncio.run(go()) == expected(model, [2], 3)
    assert engine.active == 0
    engine.drain(5)


def test_nothing_is_left_of_jobs_that_have_ended():
    model = decoder()
    engine = made(model, rows=4)

    async def go():
        cancelled = engine.submit(job(model, [1], 10**6, n=2, keep=True, logprobs=1))
        async for event in cancelled:
            if isinstance(event, Drawn):
                break
        cancelled.cancel()
        await result(engine.submit(job(model, [2], 20, n=2, keep=True, logprobs=1)))

    asyncio.run(go())
    engine.drain(5)
    rows = engine._writing._rows
    assert rows.states == rows.told == [None] * 4
    assert (engine._used, engine._running, engine._writing.runs, engine._writing.unreserved) == (0, {}, [], 4)


@pytest.mark.parametrize(("kind", "limit"), [("plan", 3000), ("model", 150)])
def test_a_job_waits_for_a_client_that_takes_nothing(kind, limit, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_EVENTS", 4)
    model = decoder()
    engine = made(model, kind, rows=2)

    async def go():
        slow = engine.submit(job(model, [1], limit))
        while not slow.behind:
            await asyncio.sleep(0.001)
        other = await result(engine.submit(job(model, [2], 20)))  # the rows of others go on
        before, drop, rounds, began = engine.counts["drawn"], engine._drop, [], time.monotonic()
        monkeypatch.setattr(engine, "_drop", lambda: rounds.append(drop()))
        await asyncio.sleep(0.05)
        assert engine.counts["drawn"] == before < limit, "nothing is drawn, and so all rows wait"
        most = 2 + (time.monotonic() - began) / engine_module.BLOCK_SECONDS
        assert len(rounds) <= most, "the thread uses no core to wait"
        return await result(slow), other

    [slow, other] = asyncio.run(go())
    engine.drain(5)
    assert slow[0] == expected(model, [1], limit)
    assert other[0] == expected(model, [2], 20)


def test_others_run_while_a_client_takes_many_events():
    async def go():
        run, turns, taken = Run(job(decoder(), [1], 1), lambda: None), 0, 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def take():
            nonlocal taken
            async for _ in run:
                taken += 1
                if taken == 60:
                    run.cancel()

        for _ in range(100):
            run.deliver(Drawn(0, [1]))
        task = asyncio.create_task(other())
        with pytest.raises(EngineError, match="given up"):
            await take()
        task.cancel()
        return taken, turns

    taken, turns = asyncio.run(go())
    assert taken == 60
    assert turns >= 60


def test_a_job_is_given_up_at_its_deadline_whether_it_runs_or_waits():
    model = decoder()
    engine = made(model, rows=1)

    async def go():
        runs = [
            engine.submit(replace(job(model, [1], 10**6), deadline=time.monotonic() + 0.2)) for _ in range(2)
        ]
        for run in runs:
            with pytest.raises(TimedOutError):
                await result(run)

    asyncio.run(go())
    engine.drain(5)


def test_a_waiting_job_is_given_up_while_another_runs():
    model = decoder()
    engine = made(model, rows=1)

    async def both():
        first = engine.submit(job(model, [1], 10**6))
        second = engine.submit(replace(job(model, [1], 10), deadline=time.monotonic() + 0.2))
        with pytest.raises(TimedOutError):
            await asyncio.wait_for(result(second), 5)
        first.cancel()

    asyncio.run(both())
    engine.drain(5)


def test_what_has_no_room_is_refused_or_waits():
    model = decoder(**MODELS["softmax"])
    engine = made(model, rows=2, queue=2, memory=PlanRunner(plan(model)).nbytes(2000))

    async def go():
        with pytest.raises(TooLargeError, match="the states would take"):
            engine.submit(job(model, [1], 3000))
        with pytest.raises(TooLargeError, match="3 continuations, but 2"):
            engine.submit(job(model, [1], 1, n=3))
        with pytest.raises(TooLargeError, match="5 prompts, but 4"):  # 2 run and 2 wait
            engine.submit(job(model, [1], 1, together=5))
        long = engine.submit(job(model, [1], 1900))
        await anext(aiter(long))  # it runs
        second = engine.submit(job(model, [2], 200))
        engine.submit(job(model, [3], 200))
        with pytest.raises(BusyError):
            engine.submit(job(model, [4], 200))
        assert engine.waiting == 2
        long.cancel()
        return await result(second)

    tokens, *_ = asyncio.run(go())
    engine.drain(5)
    assert tokens == expected(model, [2], 200)


def test_the_memory_of_a_job_is_that_of_all_its_continuations_and_of_what_its_state_has_read():
    model = decoder(**MODELS["softmax"])
    engine = made(model, memory=PlanRunner(plan(model)).nbytes(150))

    async def go():
        *_, finished = await result(engine.submit(job(model, [1] * 100, 0, keep=True)))
        [state] = finished.snapshots
        await result(engine.submit(Job([2], 5, state=state)))
        for large in (Job([2], 60, state=state), job(model, [1], 100, n=2)):
            with pytest.raises(TooLargeError, match="the states would take"):
                engine.submit(large)

    asyncio.run(go())
    engine.drain(5)


def test_memory_for_no_state_at_all_is_refused():
    runner = PlanRunner(plan(decoder()))
    with pytest.raises(ValueError, match=f"memory is 1000 bytes, but one state takes {runner.nbytes(1)}"):
        Engine(runner, digest=DIGEST, memory=1000)


def test_the_bytes_of_running_jobs_and_of_prefixes_are_known():
    model = decoder()
    engine, size = made(model), PlanRunner(plan(model)).nbytes(1)

    async def go():
        run = engine.submit(job(model, list(range(20)), 10**6, n=3))
        await anext(aiter(run))
        return run, engine.running_bytes

    run, running = asyncio.run(go())
    run.cancel()
    engine.drain(5)
    assert (running, engine.running_bytes) == (3 * size, 0)
    assert size < engine.prefix_bytes < 3 * size


def test_prompts_whose_states_never_fit_together_are_refused():
    model = decoder(**MODELS["softmax"])
    engine = made(model, queue=2, memory=PlanRunner(plan(model)).nbytes(2000))

    async def go():
        with pytest.raises(TooLargeError, match="4 prompts, but 3 are the most"):  # one runs and two wait
            engine.submit(job(model, [1], 1900, together=4))

    asyncio.run(go())
    engine.drain(5)


@pytest.mark.parametrize("rows", [(2, 2, 2, 2, 2, 2), (2, 8, 1)])
def test_the_queue_is_for_what_cannot_start(rows):
    """Of eight rows; what comes after a job that finds no room waits too."""
    model, submitted = decoder(), threading.Event()
    engine = reading_after(submitted, model, rows=8, queue=2)

    async def go():
        runs = [engine.submit(job(model, [1, 0], 5, n=n)) for n in rows]
        with pytest.raises(BusyError):
            engine.submit(job(model, [1, 0], 5))
        submitted.set()
        await asyncio.gather(*map(result, runs))

    asyncio.run(go())
    engine.drain(5)


def test_the_kernels_run_on_the_threads_that_were_asked_for():
    model, seen, before = decoder(), set(), torch.get_num_threads()

    class Runner(PlanRunner):
        def read(self, tokens, state, wanted):
            seen.add(torch.get_num_threads())
            return super().read(tokens, state, wanted)

    try:
        on(Engine(Runner(plan(model)), digest=DIGEST, threads=before + 1), job(model, [1], 1))
    finally:
        torch.set_num_threads(before)  # also of threads that are started later
    assert seen == {before + 1}


def test_clients_take_turns():
    order, submitted = [], threading.Event()

    class Runner(PlanRunner):
        def read(self, tokens, state, wanted):
            submitted.wait(10)
            order.append(tokens.tolist()[0])
            return super().read(tokens, state, wanted)

    model = decoder()
    engine = Engine(Runner(plan(model)), digest=DIGEST, rows=1)

    async def go():
        runs = [engine.submit(job(model, [n, 0], 5, client=client)) for n, client in enumerate("xaaab", 1)]
        submitted.set()
        await asyncio.gather(*map(result, runs))

    asyncio.run(go())
    engine.drain(5)
    assert order == [1, 2, 5, 3, 4]


def test_draining_lets_jobs_end_and_refuses_new_ones():
    model = decoder()

    async def go(seconds, limit):
        engine = made(model)
        run = engine.submit(job(model, [1], limit))
        done = asyncio.create_task(result(run))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(asyncio.to_thread(engine.drain, seconds))
        await asyncio.sleep(0.02)
        with pytest.raises(StoppingError):
            engine.submit(job(model, [1], 1))
        await draining
        return await done

    assert len(asyncio.run(go(30, 3000))[0][0]) == 3000
    with pytest.raises(StoppingError):
        asyncio.run(go(0.1, 10**7))


def test_a_job_that_fails_leaves_the_others():
    model = decoder()
    broken = PlanRunner(plan(model))
    read = broken.read

    def reads(tokens, state, wanted):
        logits, state = read(tokens, state, wanted)
        return (logits * float("nan") if 7 in tokens else logits), state

    broken.read = reads
    engine = Engine(broken, digest=DIGEST)

    async def go():
        good, bad = engine.submit(job(model, [1], 20)), engine.submit(job(model, [7], 20))
        with pytest.raises(EngineError, match="must define a distribution"):
            await result(bad)
        known = job(model, [7, 1], 0, logprobs=1, prompt_logprobs=True)  # JSON has no NaN
        with pytest.raises(EngineError, match="must define a distribution"):
            await result(engine.submit(known))
        return await result(good)

    tokens, *_ = asyncio.run(go())
    engine.drain(5)
    assert tokens == expected(model, [1], 20)


@pytest.mark.parametrize("limit", [0, 20])
@pytest.mark.parametrize("copies", [0, 1])
def test_a_job_that_cannot_start_leaves_the_others_and_its_rows(limit, copies):
    """The engine copies a state when it takes a job, and again for each further continuation."""
    model = decoder()
    runner = PlanRunner(plan(model))
    copy, left = runner.copy, [10**9]

    def copies_(state, tokens):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("there is no room")
        return copy(state, tokens)

    runner.copy = copies_
    engine = Engine(runner, digest=DIGEST, rows=4)

    async def go():
        good = asyncio.create_task(result(engine.submit(job(model, [1], 3000))))
        while not engine.active:
            await asyncio.sleep(0.001)
        left[0] = copies
        if limit or not copies:
            with pytest.raises(EngineError, match="there is no room"):
                await result(engine.submit(job(model, [7], limit, n=3)))
        left[0] = 10**9
        return await result(engine.submit(job(model, [1], 20, n=3))), await good

    found, _ = asyncio.run(go())
    engine.drain(5)
    assert found[0] == expected(model, [1], 20, n=3)


def test_a_watch_that_fails_leaves_the_other_jobs():
    model = decoder()
    engine = made(model, rows=5)

    def watch(index, tokens):
        raise ValueError("no text")

    async def go():
        good = engine.submit(job(model, [1], 400))
        for _ in range(2):  # the rows of the first are free for the second
            with pytest.raises(EngineError, match="a continuation failed: no text"):
                await result(engine.submit(job(model, [2], 400, n=4, watch=watch)))
        return await result(good)

    tokens, *_ = asyncio.run(go())
    engine.drain(5)
    assert tokens == expected(model, [1], 400)


def test_a_sequence_that_is_too_long_to_keep_leaves_the_others():
    model = decoder()
    engine = made(model, rows=1)

    async def go():
        *_, finished = await result(engine.submit(job(model, [1], 3, keep=True)))
        longest = replace(finished.snapshots[0], length=MOST)
        for limit in (0, 3):
            with pytest.raises(EngineError, match="length"):
                await result(engine.submit(Job([2], limit, state=longest, keep=True)))
        return await result(engine.submit(job(model, [1], 20)))

    tokens, *_ = asyncio.run(go())
    engine.drain(5)
    assert tokens == expected(model, [1], 20)


def test_a_state_of_another_model_is_refused():
    model, other = decoder(), decoder(n_layers=1)

    async def go(engine, one):
        return await result(engine.submit(one))

    engines = made(model), made(other)
    *_, finished = asyncio.run(go(engines[0], job(model, [1], 3, keep=True)))
    [state] = finished.snapshots
    with pytest.raises(EngineError, match=r"the state has .* bytes, but must have"):
        asyncio.run(go(engines[1], Job([1], 3, state=state)))
    for engine in engines:
        engine.drain(5)


def test_a_request_among_31_others_leaves_the_same_bits_as_alone():
    model = decoder(**MODELS["hybrid"])

    async def go(others):
        engine = made(model, chunk=8)
        runs = [engine.submit(job(model, [k % V] * (k + 1), 40, seed=k)) for k in range(others)]
        own = await result(engine.submit(job(model, list(range(30)), 40, seed=9, keep=True)))
        for run in runs:
            run.cancel()
        engine.drain(5)
        return own

    alone, among = asyncio.run(go(0)), asyncio.run(go(31))
    assert alone[0] == among[0]
    assert alone[3].snapshots == among[3].snapshots


def test_nobody_waits_for_an_engine_that_failed(monkeypatch):
    model = decoder()
    engine = made(model, rows=1)

    async def go():
        runs = [engine.submit(job(model, [1], 10**6)) for _ in range(2)]
        await anext(aiter(runs[0]))
        monkeypatch.setattr(engine, "_drop", None)
        for run in runs:
            with pytest.raises(EngineError, match="the engine failed"):
                await result(run)
        engine._thread.join()
        assert not engine.alive
        with pytest.raises(StoppingError):
            engine.submit(job(model, [1], 1))

    asyncio.run(go())


def test_what_is_impossible_has_a_log_probability_in_json():
    [told] = logprobs(torch.tensor([[0.0, -float("inf")]]), torch.tensor([1]), 2)
    assert told == TokenLogprob(1, -9999.0, [(0, 0.0), (1, -9999.0)])


@pytest.mark.parametrize("name", ["efficient", "aft", "window"])
def test_tensors_that_are_no_state_of_a_model_without_a_plan_are_refused(name):
    runner = ModelRunner(
        decoder(**of(name, **({"window": 4, "dilation": 2} if name == "window" else {}))).eval()
    )
    _, state = runner.read(torch.arange(9), runner.empty(), "none")
    tensors = runner.tensors(state)
    logits, _ = runner.read(torch.tensor([1]), runner.state(tensors, 9), "last")
    assert torch.equal(logits, runner.read(torch.tensor([1]), state, "last")[0])
    for key, x in tensors.items():
        for wrong in (torch.cat([x, x]), x.flatten()[None], x[:0], x.half(), x[None]):
            if wrong.shape != x.shape or wrong.dtype != x.dtype:
                with pytest.raises(ValueError, match="the state"):
                    runner.state(tensors | {key: wrong}, 9)
    with pytest.raises(ValueError, match="position of the state must be 8"):
        runner.state(tensors, 8)


def test_a_state_at_the_last_position_is_a_state():
    runner = ModelRunner(decoder(**of("aft", max_length=9)))
    _, state = runner.read(torch.arange(9), runner.empty(), "none")
    assert runner.state(runner.tensors(state), 9).position == 9


def test_the_state_of_a_performer_is_kept():
    runner = ModelRunner(decoder(**of("performer")))
    _, state = runner.read(torch.arange(9), runner.empty(), "none")
    snapshot = Snapshot(DIGEST, 10, 1, runner.tensors(state))
    assert Snapshot.of_bytes(snapshot.to_bytes()) == snapshot


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_tensors_that_are_no_state_are_refused(name):
    runner = PlanRunner(plan(decoder(**MODELS[name])))
    _, state = runner.read(torch.arange(20), runner.empty(), "none")
    tensors = runner.tensors(state)
    assert torch.equal(runner.state(tensors, 20).fixed, state.fixed)
    swapped = {"fixed": tensors["cache"], "cache": tensors["fixed"]}
    wrong = [
        tensors | {"fixed": tensors["fixed"][0]},
        tensors | {"fixed": tensors["fixed"].int()},
        {},
        swapped,
    ]
    for given in [*wrong, {"fixed": tensors["fixed"]}, {**tensors, "more": torch.zeros(0)}]:
        with pytest.raises(ValueError, match="the state"):
            runner.state(given, 20)
    if name == "softmax":  # a length that nobody has memory for
        with pytest.raises(ValueError, match=r"must have .* after 1000000000000 tokens"):
            runner.state(tensors, 10**12)


@pytest.mark.parametrize("name", ["topk", "similarity"])
def test_a_state_with_more_keys_than_tokens_is_refused(name):
    runner = ModelRunner(decoder(**of(name)).eval())
    _, state = runner.read(torch.zeros(600, dtype=torch.long), runner.empty(), "none")
    tensors = runner.tensors(state)
    assert runner.state(tensors, 600)
    forged = {key: x.fill_(3) if key.endswith("position") else x for key, x in tensors.items()}
    with pytest.raises(ValueError, match=r"the state has .* bytes, but one of 3 tokens at most"):
        runner.state(forged, 3)


@pytest.mark.parametrize("name", ["softmax", "linear", "sparse_transformer", "long_short", "performer"])
def test_the_size_of_a_state_is_estimated_for_any_length(name):
    model = decoder(**of(name))
    runner = ModelRunner(model)
    for tokens in (100, 383, 1500):
        with torch.no_grad():
            _, state = model.prefill(torch.zeros(1, tokens, dtype=torch.long), model.init_state(1))
        assert 1 <= runner.nbytes(tokens) / nbytes(state) <= 1.3


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_row_that_failed_is_used_again(kind):
    model = decoder()
    rows = RUNNERS[kind](model).rows(1)
    drawing = Drawing(Sampling(temperature=0), 0, 3, [])
    for logit, failed in ((float("nan"), [0]), (0.0, [])):
        rows.logits.fill_(logit)
        rows.start(0, RUNNERS[kind](model).empty(), drawing)
        with torch.no_grad():
            rows.draw(3)
        assert rows.failed() == failed


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", ["linear", "softmax", "window"])
def test_a_watch_may_end_a_continuation_at_the_last_token_of_a_block(kind, name):
    model = decoder(**MODELS[name])
    engine, drawn = made(model, kind), []

    def watch(index, tokens):
        drawn.extend(tokens)
        return len(tokens) if len(drawn) > 2 else None

    async def go():
        ended = await result(engine.submit(job(model, [1, 2], 400, watch=watch, keep=True)))
        exact = await result(engine.submit(job(model, [1, 2], len(drawn), keep=True)))
        return ended, exact

    ended, exact = asyncio.run(go())
    engine.drain(5)
    assert ended[0] == exact[0]
    assert ended[3].snapshots == exact[3].snapshots


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_repetition_penalty_counts_what_was_drawn(kind):
    model = decoder()
    penalised = job(model, [1, 2], 20, sampling=Sampling(temperature=0, repetition_penalty=1e9))
    [(tokens, *_)] = on(made(model, kind), penalised)
    assert len(set(tokens[0])) == 20


def test_a_job_may_take_all_of_the_memory():
    model = decoder(**MODELS["softmax"])
    engine = made(model, memory=PlanRunner(plan(model)).nbytes(31))

    async def go():
        return await asyncio.wait_for(result(engine.submit(job(model, [1], 30))), 5)

    try:
        tokens, *_ = asyncio.run(go())
    finally:
        engine.drain(0)
    assert tokens == expected(model, [1], 30)


def test_a_waiting_job_that_was_given_up_frees_its_place_in_the_queue():
    model = decoder()
    engine = made(model, rows=1, queue=1)

    async def go():
        first = engine.submit(job(model, [1], 10**6))
        await anext(aiter(first))  # it runs
        engine.submit(job(model, [2], 10)).cancel()
        until = time.monotonic() + 5
        while engine.waiting and time.monotonic() < until:
            await asyncio.sleep(0.01)
        waiting = engine.waiting
        first.cancel()
        return waiting

    assert asyncio.run(go()) == 0
    engine.drain(5)
