"""Benchmarks of Millrace and its peers, run side by side. Time limits are checked here, never in a test's assertion."""

import os

# Ray reads it at its import; see tests/conftest.py.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# The services of a benchmark require no token, and their clients send none.
os.environ.pop("MILLRACE_TOKEN_FILE", None)
