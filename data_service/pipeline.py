"""What Ray runs: an attempt at making a version, by whichever way its job names."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shared.jobs import AttemptContext


def run(context: AttemptContext) -> dict[str, Any]:
    """The entry of the one kind of job that this service has. The result names the manifest."""
    # Imported here: an import needs none of what a transform needs, and should not wait for it.
    if "transform" in context.job.spec:
        from data_service.transforms.job import run_transform
        from data_service.transforms.parallel import WAITING

        context.afterwards(WAITING.replace)
        return run_transform(context)
    if "predict" in context.job.spec:
        from data_service.transforms.predict_job import run_predict

        return run_predict(context)
    from data_service.imports.job import run_import

    return run_import(context)


def prepare() -> None:
    """Imports what imports, transforms and predictions need, in a process that has nothing to do yet."""
    import data_service.imports.job
    import data_service.transforms.job
    import data_service.transforms.predict_job  # noqa: F401
    from shared import dataset_stream

    dataset_stream.prepare()
    # Arrow imports pandas with the first array that it makes of Python's values, and only then.
    pa.array([0])
