"""`python -m modtrace`: the command line where no `modtrace` is on PATH."""

from .cli.main import main

if __name__ == "__main__":
    main()
