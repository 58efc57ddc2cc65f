"""Models and weights of other libraries, in and out. Each needs its own extra, so nothing is imported here."""
