"""A model of a table with a column of each awkward kind, a good request for it, and a stand-in that answers."""

from __future__ import annotations

import numpy as np

from inference import grpc_service_pb2 as oip
from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec
from tests.support.inference_server import Server, deployment

SIGNATURE = Signature(
    (
        TensorSpec("text", "BYTES", (-1,), nullable=True),
        TensorSpec("age", "FP32", (-1,), nullable=True),
        TensorSpec("grid", "INT64", (-1, 2, 2)),
        TensorSpec("small", "INT8", (-1,)),
        TensorSpec("half", "FP16", (-1,)),
    ),
    TensorSpec("x", "FP32", (-1, 3)),
    (TensorSpec("logits", "FP32", (-1, 4)), TensorSpec("label", "INT64", (-1,))),
)
TABLE = deployment("t", SIGNATURE)
RAW = {
    "text": b"\1\0\0\0a\2\0\0\0bc",
    "age": np.array([1, np.nan], "<f4").tobytes(),
    "grid": np.arange(8, dtype="<i8").tobytes(),
    "small": b"\1\2",
    "half": np.array([1, 2], "<f2").tobytes(),
}


class Zeros:
    async def forward(self, rows: Rows) -> Outputs:
        return Outputs([np.zeros((len(rows), 4), np.float32), np.zeros(len(rows), np.int64)])


def request() -> oip.ModelInferRequest:
    """Two rows, one of them with a NaN, which is the replica's business."""
    shapes = {"grid": (2, 2, 2)}
    return oip.ModelInferRequest(
        model_name="t",
        inputs=[
            {"name": spec.name, "datatype": spec.datatype, "shape": shapes.get(spec.name, (2,))}
            for spec in SIGNATURE.raw
        ],
        raw_input_contents=[RAW[spec.name] for spec in SIGNATURE.raw],
    )


async def still_serves(server: Server) -> None:
    assert len((await server.stub.ModelInfer(request())).outputs) == 2
    assert sum(one.queued_rows for one in server.models.listed()) == 0
