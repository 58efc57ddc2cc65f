"""A server on a fake engine, for tests that need a process: run_fake.py PAUSE HEADER_SECONDS BODY_SECONDS DRAIN."""

import sys

from serving.fakes import FakeEngine, FakeStates, served

from unrolled.serving.server import serve
from unrolled.serving.settings import Settings


class Closing(FakeStates):
    def close(self) -> None:
        print("closed", flush=True)


if __name__ == "__main__":
    pause, header_seconds, body_seconds, drain = map(float, sys.argv[1:5])
    settings = Settings(port=0, header_seconds=header_seconds, body_seconds=body_seconds, drain=drain)
    models = [served(FakeEngine(pause=pause, block=1))]
    serve(models, Closing(), settings, lambda address: print(address, flush=True))
