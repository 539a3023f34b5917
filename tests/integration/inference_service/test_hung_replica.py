"""A replica whose model hangs is replaced: nobody can interrupt what runs in its thread."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save

from inference import grpc_service_pb2 as oip
from shared.model_spec import ModelSpec
from shared.models import build_model
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.client import Client, eventually
from tests.integration.inference_service.conftest import Stack
from tests.support import custom_functions
from tests.support.checkpoint_samples import content
from tests.support.versions import columns_of

JOB = "trainingJobs/table"
MLP = ModelSpec(builder="mlp", in_channels=1, num_classes=2, kwargs={"hidden": [4]})
STEPS: list[dict[str, Any]] = [
    {"custom": {"function": f"{custom_functions.MODULE}:hanging", "columns": ["a"], "timeoutS": 1}},
    {"concat": {"columns": ["a"], "into": "x"}},
]
REPLICA = "ray::ServeReplica"


def ask(client: Client, value: float, timeout_s: float) -> oip.ModelInferResponse:
    tensor = oip.ModelInferRequest.InferInputTensor(name="a", datatype="FP64", shape=[1])
    request = oip.ModelInferRequest(model_name="table", inputs=[tensor], raw_input_contents=[struct.pack("<d", value)])
    answer: oip.ModelInferResponse = client.inference.ModelInfer(request, timeout=timeout_s)
    return answer


def replica_log(stack: Stack) -> Iterator[dict[str, Any]]:
    """What the replicas have logged, from Ray's logs of their processes."""
    for file in stack.head.folder.glob("session_latest/logs/worker-*.err"):
        for line in file.read_text().splitlines():
            if '"service": "inference-replica"' in line:
                yield json.loads(line)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_replica_whose_function_never_returns_is_replaced_by_another(stack: Stack) -> None:
    columns = columns_of(pa.schema([("a", pa.float64()), ("y", pa.int64())]))
    said = content(training_job=JOB, model=MLP, ingested=columns, transforms=[{"steps": STEPS}], input_column="x")
    torch.manual_seed(3)
    write(stack.store, job=JOB, weights=save(build_model(MLP).state_dict()), said=said)
    others = set(stack.head.processes(REPLICA))
    deployment = stack.client.deploy("table", JOB)
    (hung,) = set(stack.head.processes(REPLICA)) - others
    try:
        ask(stack.client, 1.0, 20)
        with pytest.raises(grpc.RpcError) as late:
            ask(stack.client, custom_functions.POISON, 2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        def answered() -> bool:
            try:
                ask(stack.client, 1.0, 5)
            except grpc.RpcError:
                return False
            return True

        eventually(answered, 240, "a replica answers again")
        eventually(lambda: hung not in stack.head.processes(REPLICA), 180, "the one that hung is gone")
        line = next(line for line in replica_log(stack) if "at one batch" in line["message"])
        assert line["service"] == "inference-replica"
        assert line["application"].startswith("millrace-")
    finally:
        stack.client.delete(deployment.name)
