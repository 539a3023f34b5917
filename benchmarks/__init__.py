"""Ours beside the peers, in one run. Timed claims live here, never in a test's assertion."""

import os

# Ray must know it before it is imported; see tests/conftest.py.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
