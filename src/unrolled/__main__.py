"""`python -m unrolled` is the command line, where its script is not on the path."""

from unrolled.cli import main

if __name__ == "__main__":
    main()
