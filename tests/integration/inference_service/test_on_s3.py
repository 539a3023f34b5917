"""The same service on a real S3 server: what depends on the store."""

from __future__ import annotations

import grpc
import numpy as np
import torch

from shared.checkpoint.format import WEIGHTS
from tests.integration.inference_service.checkpoints import make_module, write
from tests.integration.inference_service.client import outputs
from tests.integration.inference_service.conftest import Stack
from tests.support.refusals import refusal_of, refused

IMAGES = np.random.default_rng(3).integers(0, 256, (3, 28, 28), dtype=np.uint8)


def test_a_checkpoint_on_s3_is_served_and_taken_out_of_service(s3_stack: Stack) -> None:
    client = s3_stack.client
    deployment = client.deploy("digits", "trainingJobs/digits")
    answer = client.infer("digits", IMAGES)
    with torch.inference_mode():
        prepared = s3_stack.checkpoint.content.serving()({"image": IMAGES})["image"]
        expected = make_module()(torch.from_numpy(prepared)).numpy()
    np.testing.assert_allclose(outputs(answer)["logits"], expected, atol=1e-5, rtol=0)
    assert answer.parameters["checkpoint_sha256"].string_param == s3_stack.checkpoint.entry.manifest_sha256
    client.delete(deployment.name)
    assert refused(lambda: client.infer("digits", IMAGES)).code is grpc.StatusCode.NOT_FOUND


def test_a_damaged_checkpoint_on_s3_is_data_loss(s3_stack: Stack) -> None:
    written = write(s3_stack.store, job="trainingJobs/damaged", weights=b"some weights")
    s3_stack.store.put(f"{written.entry.folder}/{WEIGHTS}", b"other weights")
    operation = s3_stack.client.wait(s3_stack.client.create("failing", "trainingJobs/damaged"))
    assert refusal_of(operation.error).code is grpc.StatusCode.DATA_LOSS
