"""What Ray runs: an attempt at making a version, by whichever way its job names."""

from __future__ import annotations

from typing import Any

from shared.jobs import AttemptContext


def run(context: AttemptContext) -> dict[str, Any]:
    """The entry of the one kind of job that this service has. The result names the manifest."""
    # Imported here: an import needs none of what a transform needs, and should not wait for it.
    if "transform" in context.job.spec:
        from data_service.transforming.job import run_transform

        return run_transform(context)
    from data_service.ingest.job import run_import

    return run_import(context)
