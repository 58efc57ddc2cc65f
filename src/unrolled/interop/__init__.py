"""Other libraries' formats and classes, in and out. Each needs its own extra, so nothing is imported here."""
