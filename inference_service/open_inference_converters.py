"""Between the messages of the Open Inference Protocol and plain values."""

from __future__ import annotations

from inference import grpc_service_pb2 as pb
from inference_service.domain.deployment import Deployment
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.domain.tensors import WireTensor, encode_raw, encode_typed, has_typed_form
from inference_service.models import Answer
from shared.errors import invalid_field

PLATFORM = "millrace_pytorch"


def inputs_from_proto(request: pb.ModelInferRequest) -> list[WireTensor]:
    """Raises `InvalidArgument` where raw contents do not pair with inputs; tensors themselves are checked later."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid_field(
            "raw_input_contents", f"{len(raw)} entries", f"send one for each of the {len(request.inputs)} inputs"
        )
    return [
        WireTensor(
            field=f"inputs[{index}]",
            name=tensor.name,
            datatype=tensor.datatype,
            shape=tuple(tensor.shape),
            raw=raw[index] if raw else None,
            typed={field.name: values for field, values in tensor.contents.ListFields()},
        )
        for index, tensor in enumerate(request.inputs)
    ]


def answer_to_proto(request: pb.ModelInferRequest, answer: Answer) -> pb.ModelInferResponse:
    """Outputs in the form that the inputs had, raw or typed."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=answer.version.number, id=request.id)
    for name, value in _lineage(answer).items():
        response.parameters[name].string_param = value
    typed = not request.raw_input_contents and all(has_typed_form(spec.datatype) for spec, _ in answer.outputs)
    for spec, values in answer.outputs:
        output = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=values.shape)
        if typed:
            field, elements = encode_typed(spec.datatype, values)
            getattr(output.contents, field).extend(elements)
        else:
            response.raw_output_contents.append(encode_raw(spec.datatype, values))
    return response


def metadata_to_proto(deployment: Deployment, signature: Signature) -> pb.ModelMetadataResponse:
    """Lists the raw form, a tensor for each column; the prepared one, and flags of nulls, are accepted too."""
    return pb.ModelMetadataResponse(
        name=deployment.model_name,
        versions=[version.number for version in deployment.versions],
        platform=PLATFORM,
        inputs=[_tensor(given) for given in signature.raw],
        outputs=[_tensor(output) for output in signature.outputs],
    )


def _lineage(answer: Answer) -> dict[str, str]:
    """The fields of `millrace.common.v1.Lineage`, as parameters."""
    return {
        "dataset_version": answer.version.dataset_version,
        "training_job": answer.version.training_job,
        "checkpoint": answer.version.checkpoint,
        "checkpoint_sha256": answer.version.checkpoint_sha256,
        "deployment": answer.deployment.name,
        "model_version": answer.version.number,
    }


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)
