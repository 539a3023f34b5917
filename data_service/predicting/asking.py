"""What can be said of a prediction as soon as its source and its checkpoint are known, before any row is read."""

from __future__ import annotations

from collections.abc import Collection

from data_service.domain.predict_spec import CheckpointRef, PredictSpec
from data_service.predicting.checking import preparation
from data_service.predicting.columns import new_columns
from shared.checkpoint import load_checkpoint, resolve
from shared.dataset_version import DatasetVersion
from shared.errors import FailedPrecondition
from shared.own_code import OwnCode, check_functions
from shared.storage import ObjectStore
from shared.transforms.steps.custom_child import functions_in_children


def found_checkpoint(store: ObjectStore, asked: CheckpointRef) -> CheckpointRef:
    """Raises what `resolve` raises, and `FailedPrecondition` where a digest is asked for that it does not have."""
    entry = resolve(store, "checkpoint", asked.name)
    if asked.sha256 and asked.sha256 != entry.manifest_sha256:
        raise FailedPrecondition(
            f"checkpoint_sha256: {entry.name} has the manifest {entry.manifest_sha256}, not {asked.sha256}; it was "
            "written again, or is another one",
            reason="CHECKPOINT_REPLACED",
            metadata={"resource": entry.name},
            fields=[("checkpoint_sha256", "is that of another checkpoint")],
        )
    return CheckpointRef(name=entry.name, folder=entry.folder, sha256=entry.manifest_sha256)


def check_predict(
    store: ObjectStore,
    spec: PredictSpec,
    source: DatasetVersion,
    checkpoint: CheckpointRef,
    custom_allowed: Collection[str],
    own_code: OwnCode,
) -> None:
    """Raises what `PredictVersion` says of a request. `custom_allowed` are the functions that custom steps may name,
    `own_code` says whether a model of a user's own code may run; `spec` has passed `predict_spec.check`."""
    if spec.split:
        source.split(spec.split)
    content = load_checkpoint(store, checkpoint.folder, checkpoint.sha256).content
    if content.model.is_own:
        own_code.require_own_code(f"checkpoint: the model of {checkpoint.name} is made by a user's own code: ")
    check_functions(content.transforms, custom_allowed, "in the data service")
    # An operator's function must not hang or end the service that answers.
    with functions_in_children():
        preparation(content, source.manifest, source.name)
        new_columns(spec, source.manifest, content)
