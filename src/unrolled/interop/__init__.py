"""Models and weights of other libraries, in and out. Each needs its extra, so nothing is imported here."""
