"""How many cases the fuzzers of compiled code run: few in `make test`, many in `make sanitize`."""

import os

#: A factor on the number of cases.
FUZZ = int(os.environ.get("MODTRACE_FUZZ", "1"))
