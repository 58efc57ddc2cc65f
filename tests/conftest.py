"""Settings of every test process, and a fixture for tests that write ONNX graphs again and again."""

import gc
import signal

import pytest

# A full collection visits every object of torch and of the tests, and exports make garbage by the million: at
# Python's own thresholds, which suit small programs, the collector takes 3 % of all the time.
gc.set_threshold(20_000, 20, 20)

# Under `nohup`, this process and those that it starts would ignore SIGHUP, but tests end processes by SIGHUP.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

TRACED = {}


@pytest.fixture
def traced_once(monkeypatch):
    """Trace a model once in all these tests: it takes seconds, and they are about what becomes of the graphs."""
    from unrolled.interop.onnx import folder

    trace = folder.to_onnx

    def once(model, **options):
        key = repr(model), repr(model.config), folder.weights_checksum(model), *sorted(options.items())
        if key not in TRACED:
            TRACED[key] = trace(model, **options)
        return TRACED[key]

    monkeypatch.setattr(folder, "to_onnx", once)
