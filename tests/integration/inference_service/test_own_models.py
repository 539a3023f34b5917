"""A model that a user's own code makes, served by a replica of a service that may run such code, and by no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import save

from inference_service.domain.signature import RAW, Rows
from inference_service.serve.replica import ModelReplica, ReplicaSpec
from shared.checkpoint import CheckpointRegistry
from shared.code_bundle_registry import load_code
from shared.errors import FailedPrecondition
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.integration.inference_service.checkpoints import Written, content, write
from tests.integration.inference_service.client import assert_same_answer, outputs
from tests.integration.inference_service.conftest import Stack
from tests.support.code_folders import store_bundle
from tests.support.own_models import code_of_this_process

NET = """
import torch
from torch import nn


class Cells(nn.Module):
    def __init__(self, width, outputs=10, raises=False):
        super().__init__()
        self.raises = raises
        self.body = nn.Sequential(nn.Conv2d(1, width, 5, stride=4), nn.Flatten(), nn.Linear(width * 36, outputs))

    def forward(self, images):
        if self.raises:
            raise ValueError("not today")
        return self.body(images)
"""
JOB = "trainingJobs/cells"
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)


def write_own(store: ObjectStore, **kwargs: object) -> tuple[Written, torch.nn.Module]:
    """A checkpoint of it as training writes it, and the model."""
    bundle = store_bundle(store, {"net.py": NET})
    spec = ModelSpec(
        builder="",
        in_channels=1,
        num_classes=10,
        code_bundle=bundle.name,
        entry="net:Cells",
        kwargs={"width": 4, **kwargs},
    )
    torch.manual_seed(7)
    with code_of_this_process():
        load_code(store, bundle.name)
        module = build_model(spec).eval()
    said = replace(content(0.9, JOB), model=spec)
    written = write(store, job=JOB, weights=save(module.state_dict()), said=said)
    registry = CheckpointRegistry(store, JOB)
    entry = replace(
        written.entry, name=f"{JOB}/checkpoints/c2", step=101, code_bundle=bundle.name, model_entry="net:Cells"
    )
    registry.commit(entry)
    return Written(entry, said), module


def test_an_own_model_is_served_with_the_answers_of_the_model_and_names_its_code(s3_stack: Stack) -> None:
    trusted = s3_stack
    written, module = write_own(trusted.store)

    deployment = trusted.client.deploy("cells", f"{JOB}/checkpoints/c2")
    answer = trusted.client.infer("cells", IMAGES)

    prepared = torch.from_numpy(written.content.serving()({"image": IMAGES})["image"])
    assert_same_answer(outputs(answer)["logits"], module(prepared).detach().numpy())
    assert deployment.lineage.code_bundle == written.entry.code_bundle
    assert answer.parameters["code_bundle"].string_param == written.entry.code_bundle
    # A version of another model has none.
    trusted.client.deploy("digits", "trainingJobs/digits")
    assert "code_bundle" not in trusted.client.infer("digits", IMAGES).parameters
    for name in ("cells", "digits"):
        trusted.client.delete(f"deployments/{name}")


def test_a_service_that_runs_no_such_code_deploys_none(stack: Stack) -> None:
    write_own(stack.store)

    with pytest.raises(grpc.RpcError) as refused:
        stack.client.create("cells", f"{JOB}/checkpoints/c2")

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "MILLRACE_OWN_CODE=trusted" in str(refused.value.details())


def replica(settings: StoreSettings, written: Written, *, own_code: bool) -> ModelReplica:
    return ModelReplica(
        ReplicaSpec(
            store=settings,
            folder=written.entry.folder,
            manifest_sha256=written.entry.manifest_sha256,
            threads=1,
            max_batch_size=4,
            own_code=own_code,
        )
    )


def refusal(settings: StoreSettings, written: Written, *, own_code: bool = True) -> FailedPrecondition:
    with code_of_this_process(), pytest.raises(FailedPrecondition) as refused:
        asyncio.run(replica(settings, written, own_code=own_code).describe())
    return refused.value


def test_a_replica_loads_such_code_only_where_the_operator_allows_it(file_store: StoreSettings) -> None:
    written, module = write_own(open_store(file_store))
    with code_of_this_process():
        logits = asyncio.run(replica(file_store, written, own_code=True).forward(Rows(RAW, {"image": IMAGES}))).arrays[
            0
        ]
    prepared = torch.from_numpy(written.content.serving()({"image": IMAGES})["image"])

    assert_same_answer(logits, module(prepared).detach().numpy())
    assert refusal(file_store, written, own_code=False).specific_reason == "OWN_CODE_OFF"


def test_code_that_raises_or_gives_something_else_is_refused_for_good(
    file_store: StoreSettings, tmp_path: Path
) -> None:
    raising, _ = write_own(open_store(file_store), raises=True)
    other = StoreSettings(url=(tmp_path / "other").as_uri())
    wide, _ = write_own(open_store(other), outputs=3)

    raised, refused = refusal(file_store, raising), refusal(other, wide)

    assert (raised.specific_reason, "net.py:14: ValueError" in raised.message) == ("ENTRY_FAILED", True)
    assert (refused.specific_reason, "(1, 3) for 1 rows" in refused.message) == ("MODEL_DOES_NOT_SERVE", True)
