"""How many cases fuzzers run: few in `make test`, many in `make sanitize` and `make soak`."""

import os

#: A factor on the number of cases.
FUZZ = int(os.environ.get("MODTRACE_FUZZ", "1"))
