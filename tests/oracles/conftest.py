"""Every test here compares with a library that nobody here wrote; the differences are printed as a table."""

from agreement import TABLE


def pytest_terminal_summary(terminalreporter):
    if TABLE:
        terminalreporter.write_line("\n| theirs | compared | largest difference / largest value |")
        terminalreporter.write_line("| --- | --- | ---: |")
        for library, what, difference in TABLE:
            terminalreporter.write_line(f"| {library} | {what} | {difference:.1e} |")
