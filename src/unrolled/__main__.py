"""The command line as `python -m unrolled`, for when its script is not on the path."""

from unrolled.cli import main

if __name__ == "__main__":
    main()
