"""How many attempts of a job may be lost before it fails: the defaults, and the largest numbers that a client may set.

`transitions.lose_attempt` counts a lost attempt as a failure, or as a preemption if its node was taken away.
"""

from __future__ import annotations

# Of a training job whose specification sets neither, and of each job that makes a dataset version.
DEFAULT_MAX_FAILURES = 3
DEFAULT_MAX_PREEMPTIONS = 100

# The largest numbers in a specification.
MAX_FAILURES_LIMIT = 1000
MAX_PREEMPTIONS_LIMIT = 100_000

# Of a sweep's own process, whose loss costs its trials nothing. Nodes that come and go must not end a search of days,
# but a sweep that never makes progress must end.
SWEEP_MAX_FAILURES = 100
