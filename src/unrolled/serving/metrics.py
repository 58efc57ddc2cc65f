"""Metrics of a running server, in the format of Prometheus."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BLOCK_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        waiting: returns the number of jobs in queues.
        active: returns the number of rows in use.
        state_bytes: functions that return the bytes of states in memory: "kept" by clients, of "running"
            requests, and of "prefixes" of prompts.
    """

    def __init__(
        self,
        waiting: Callable[[], int],
        active: Callable[[], int],
        state_bytes: Mapping[str, Callable[[], int]],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "unrolled_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.cut = Counter(  # their status is 200, which was sent before
            "unrolled_cut_streams", "Streams that ended early, by reason.", ["reason"], registry=registry
        )
        tokens = Counter(
            "unrolled_tokens",
            "Tokens that were read, not read again (cached), or drawn.",
            ["kind"],
            registry=registry,
        )
        self.read = tokens.labels("read")
        self.cached = tokens.labels("cached")
        self.drawn = tokens.labels("drawn")
        self.first_token = Histogram(
            "unrolled_first_token_seconds",
            "From a request to its first new token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.block = Histogram(
            "unrolled_block_seconds",
            "Between two blocks of new tokens of a request.",
            buckets=BLOCK_SECONDS,
            registry=registry,
        )
        Gauge("unrolled_waiting", "Jobs in queues.", registry=registry).set_function(waiting)
        Gauge("unrolled_rows", "Rows in use.", registry=registry).set_function(active)
        states = Gauge(
            "unrolled_state_bytes",
            "Bytes of states in memory: of those that clients keep (the cache of the store), reserved by "
            "running requests, and of prefixes of prompts.",
            ["of"],
            registry=registry,
        )
        for of, value in state_bytes.items():
            states.labels(of).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
