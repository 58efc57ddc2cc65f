"""Reading a prompt in chunks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unrolled.serving.jobs import Run, TokenLogprob
from unrolled.serving.prefixes import SHORTEST, Prefixes
from unrolled.serving.runner import Runner, Wanted
from unrolled.serving.snapshot import Snapshot

LEAST = -9999.0  # log probability of what is impossible, as OpenAI has it: JSON has no infinity


class Reading:
    """Reads the tokens of a job in chunks, from the longest prefix whose state is kept.

    The last token is read separately if the state before it is needed: to keep it for other prompts, or as
    the state of a job that draws nothing.

    Args:
        run: the run of the job.
        runner: reads the tokens.
        prefixes: looks up and keeps states of prompts.

    Attributes:
        cached: number of tokens of the state and of the prompt that are not read again.
        logprobs: log probabilities of the tokens of the job, if the job asks for them.
        logits: [1, vocab_size], the logits of the token after the prompt.
        state: the state after the tokens that were read so far.
        tokens: all tokens that follow the state of the job, int64.
        start: number of tokens that the state of the job had read.
        room: maximum number of tokens of the sequence, including those that will be drawn.

    Raises:
        ValueError: the state of the job does not fit the model.
    """

    def __init__(self, run: Run, runner: Runner, prefixes: Prefixes) -> None:
        job = run.job
        self.run, self._runner, self._prefixes = run, runner, prefixes
        before = [] if job.state is None else [job.state.pending]
        self.tokens = np.array([*before, *job.tokens], np.int64)
        self.start = 0 if job.state is None else job.state.length - 1
        self.room = self.start + len(self.tokens) + job.limit
        self._at, self._junction = 0, None
        self._shared = job.state is None and len(self.tokens) > SHORTEST
        kept: Any = None
        if self._shared and not job.prompt_logprobs:
            self._at, kept, self._junction = prefixes.find(self.tokens[:-1], job.owner)
        if job.state is not None:
            kept = runner.state(job.state.tensors, self.start)
        self.cached = self.start + self._at
        self.state = runner.copy(runner.empty() if kept is None else kept, self.room)
        self.logits = torch.empty(0, runner.vocab_size)
        self.logprobs: list[TokenLogprob | None] | None = None
        if job.prompt_logprobs:
            self.logprobs = [None] if job.state is None else []

    @property
    def done(self) -> bool:
        """Whether all tokens that must be read have been read."""
        return self._at == len(self.tokens) - (self.run.job.limit == 0)

    def advance(self, chunk: int) -> int:
        """Read up to `chunk` tokens; return how many were read."""
        if self.done:
            return 0
        last = len(self.tokens) - 1
        stops = [self._at + chunk, last if self._splits and self._at < last else last + 1]
        if self._junction is not None and self._at < self._junction:
            stops.append(self._junction)
        end = min(stops)
        wanted: Wanted = "last" if end == last + 1 else "none"
        if self.logprobs is not None:
            wanted = "all"
        tokens = torch.from_numpy(self.tokens[self._at : end])
        logits, self.state = self._runner.read(tokens, self.state, wanted)
        if self.logprobs is not None:
            following = torch.from_numpy(self.tokens[self._at + 1 : end + 1])
            self.logprobs += logprobs(logits[: len(following)], following, self.run.job.logprobs or 0)
        if end == last + 1:
            self.logits = logits[-1:]
        read, self._at = end - self._at, end
        if self._shared and end in (self._junction, last):
            self._keep(end)
        return read

    @property
    def _splits(self) -> bool:
        """Whether the last token is read separately."""
        return self._shared or self.run.job.limit == 0

    def _keep(self, end: int) -> None:
        copy = self._runner.copy(self.state, end)
        self._prefixes.keep(self.tokens[:end], self.run.job.owner, copy, self._runner.nbytes(end))

    def keep_all(self, drawn: list[int], state: Any) -> None:
        """Keep the state at the end of a single continuation, which has read all but the last of `drawn`."""
        if self.run.job.state is not None or len(self.run.job.keys) > 1:
            return
        tokens = np.concatenate([self.tokens, np.array(drawn[:-1], np.int64)])
        copy = self._runner.copy(state, len(tokens))
        self._prefixes.keep(tokens, self.run.job.owner, copy, self._runner.nbytes(len(tokens)))

    def snapshots(self, digest: str) -> list[Snapshot] | None:
        """Return the state of a job that draws nothing, once for each continuation."""
        if not self.run.job.keep:
            return None
        length, pending = self.start + len(self.tokens), int(self.tokens[-1])
        made = Snapshot(digest, length, pending, self._runner.tensors(self.state))
        return [made] * len(self.run.job.keys)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
    """Return the log probabilities of tokens, at least `LEAST`.

    Args:
        logits: [n, vocab_size].
        tokens: [n], one for each row.
        top: number of most likely tokens of each row to return too.

    Raises:
        ValueError: a row of logits is not a distribution.
    """
    all_ = logits.double().log_softmax(-1)
    if bool(all_.isnan().any()):
        raise ValueError("logits hold NaN, +inf or only -inf, but must define a distribution")
    all_ = all_.clamp(min=LEAST)
    own = all_.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = all_.topk(min(top, logits.shape[-1]), -1)
    return [
        TokenLogprob(token, value, list(zip(row_ids, row_values, strict=True)))
        for token, value, row_ids, row_values in zip(
            tokens.tolist(), own, ids.tolist(), values.tolist(), strict=True
        )
    ]
