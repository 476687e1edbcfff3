"""Runs the command line as `python -m modtrace`, where no `modtrace` is on PATH."""

from .cli.main import main

if __name__ == "__main__":
    main()
