"""Ours beside the peers, in one run. Timed claims live here, never in a test's assertion."""

import os

# Ray must know it before it is imported; see tests/conftest.py.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# The services of a benchmark demand no token, and what loads them brings none.
os.environ.pop("MILLRACE_TOKEN_FILE", None)
