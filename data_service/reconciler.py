"""The only process of the service that talks to Ray: `python -m data_service.reconciler`, supervised by the server.

It starts an attempt at each version in a process on Ray, whose entry point is `run`: one attempt at creating a version,
by the kind of its job.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from data_service.parallel import missing_capacity
from data_service.settings import data_settings
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import AttemptContext
from shared.jobs.reconciler import JobKind, run_reconciler
from shared.logging_and_tracing import configure_logging

# --- Entry points ---


def run(context: AttemptContext) -> dict[str, Any]:
    """Run one attempt of a version job; the result names the manifest."""
    # Imported here: an import needs no module of a transform, and should not wait for it.
    from data_service.parallel import STANDBY_WORKERS

    context.afterwards(STANDBY_WORKERS.replace)  # it starts none if the job had no tasks
    if "transform" in context.job.spec:
        from data_service.transforms.job import run_transform

        return run_transform(context)
    if "predict" in context.job.spec:
        from data_service.transforms.predict_job import run_predict

        return run_predict(context)
    from data_service.imports.job import run_import

    return run_import(context)


def prepare() -> None:
    """Preload the modules of imports, transforms and predictions in an idle process, and start its reader."""
    import data_service.imports.job
    import data_service.transforms.job
    import data_service.transforms.predict_job  # noqa: F401
    from data_service.imports.reader import start_reader
    from shared import ray_data_stream

    start_reader()
    ray_data_stream.prepare()
    # Arrow imports pandas only with its first array of Python values.
    pa.array([0])


# --- Reconciler ---

ENTRY = "data_service.reconciler:run"
PREPARE = "data_service.reconciler:prepare"


def main() -> None:
    settings = data_settings(os.environ)
    configure_logging("data-reconciler", settings.service.log_level)
    prepare = PREPARE if settings.standby_attempt else ""
    run_reconciler(
        settings.service, JobKind(name=IMPORT_KIND, entry=ENTRY, prepare=prepare, missing_capacity=missing_capacity)
    )


if __name__ == "__main__":
    main()
