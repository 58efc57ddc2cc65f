"""Which stores a test of tests/serving/store runs on."""

import pytest


def kinds(*names: str) -> list[object]:
    """Mark what needs a library or a program that `make test-store` installs."""
    return [
        name if name in ("memory", "sqlite") else pytest.param(name, marks=pytest.mark.store)
        for name in names
    ]


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds(*names), indirect=True)
