"""What a script's trainer says of its own run, in place of the fields of the specification that its caller left open.

The caller's value wins: only a field in `TrainingSpec.left_open` is taken. What an attempt took is kept with the job
(`JobRecord.choices`), so the next attempt waits for the same workers and reads rows in the same order. The number of
lanes, on which that order hangs, is settled by the first `fit()` of the job, and stays for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from train_service.domain.spec import TrainingSpec

# The key in `JobRecord.choices`: settings by the path of their field.
SCRIPT = "script"
# Those of a job as a whole, which the log keeps in fields of its own.
BUDGETS = ("max_failures", "max_preemptions")


def with_settings(spec: TrainingSpec, settings: Mapping[str, Any]) -> TrainingSpec:
    """`spec` with `settings`, values by the path of a field, e.g. `placement.backend`, that are no longer open."""
    for path, value in settings.items():
        parent, _, name = path.rpartition(".")
        change = {parent: replace(getattr(spec, parent), **{name: value})} if parent else {name: value}
        spec = replace(spec, **change)
    return replace(spec, left_open=tuple(one for one in spec.left_open if one not in settings))


def spec_of_job(config: Mapping[str, Any], choices: Mapping[str, Any]) -> TrainingSpec:
    """The specification of a job, with what its script has said of the run that is at work."""
    return with_settings(TrainingSpec.from_config(config), choices.get(SCRIPT, {}))
