"""Every test here compares with an independent library; the differences are printed as a table."""

from pathlib import Path

import pytest
from agreement import TABLE


@pytest.hookimpl(tryfirst=True)  # before the items of other marks are deselected
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.oracles)


def pytest_terminal_summary(terminalreporter):
    if TABLE:
        terminalreporter.write_line("\n| theirs | compared | largest difference / largest value |")
        terminalreporter.write_line("| --- | --- | ---: |")
        for library, what, difference in TABLE:
            terminalreporter.write_line(f"| {library} | {what} | {difference:.1e} |")
