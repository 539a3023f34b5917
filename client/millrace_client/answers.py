"""What a model answers: its outputs, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from inference import grpc_service_pb2 as pb
from millrace.common.v1.lineage_pb2 import Lineage
from millrace_client.tensors import output_arrays

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response: its output arrays by name, and where the model that made them comes from."""

    outputs: Arrays
    lineage: Lineage
    model: str
    version: str
    # From sending the request that was answered to its answer.
    latency_s: float


def answer_of(response: pb.ModelInferResponse, latency_s: float) -> Answer:
    parameters = {key: value.string_param for key, value in response.parameters.items()}
    return Answer(
        outputs=output_arrays(response),
        lineage=Lineage(**{field: parameters.get(field, "") for field in Lineage.DESCRIPTOR.fields_by_name}),
        model=response.model_name,
        version=response.model_version,
        latency_s=latency_s,
    )
