"""The entry point on Ray: one attempt at creating a version, by the kind of its job."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shared.jobs import AttemptContext


def run(context: AttemptContext) -> dict[str, Any]:
    """Runs one attempt of a version job; the result names the manifest."""
    # Imported here: an import needs no module of a transform, and should not wait for it.
    from data_service.parallel import WAITING

    context.afterwards(WAITING.replace)  # it starts none if the job had no tasks
    if "transform" in context.job.spec:
        from data_service.transforms.job import run_transform

        return run_transform(context)
    if "predict" in context.job.spec:
        from data_service.transforms.predict_job import run_predict

        return run_predict(context)
    from data_service.imports.job import run_import

    return run_import(context)


def prepare() -> None:
    """Preloads the modules of imports, transforms and predictions in an idle process."""
    import data_service.imports.job
    import data_service.transforms.job
    import data_service.transforms.predict_job  # noqa: F401
    from shared import dataset_stream

    dataset_stream.prepare()
    # Arrow imports pandas only with its first array of Python values.
    pa.array([0])
