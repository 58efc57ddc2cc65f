"""Settings of every test process, and a fixture for tests that need no real ONNX graphs."""

import gc
import signal

import pytest
from hypothesis import settings

# A full collection visits every object of torch and of the tests, and exports make garbage by the million: at
# Python's own thresholds, which suit small programs, the collector takes 3 % of all the time.
gc.set_threshold(20_000, 20, 20)

# How long an example takes says nothing on a machine that does other work too.
settings.register_profile("unrolled", settings.default, deadline=None)
settings.load_profile("unrolled")

# Under `nohup`, this process and those that it starts would ignore SIGHUP, but tests end processes by SIGHUP.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def untraced(monkeypatch):
    """Put bytes in place of graphs: a trace takes seconds, and these tests are about what becomes of files."""
    from unrolled.interop.onnx import folder, speech
    from unrolled.interop.onnx.graph import Recurrence

    def to_onnx(model, *, probes=False, **options):
        return Recurrence(model, probes=probes), b"a graph" * 300

    monkeypatch.setattr(folder, "to_onnx", to_onnx)
    monkeypatch.setattr(speech, "_graph", lambda *arguments: b"a graph" * 300)
