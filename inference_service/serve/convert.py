"""Between the messages of the Open Inference Protocol and plain values."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inference import grpc_service_pb2 as pb
from inference_service.domain.deployment import Deployment
from inference_service.domain.signature import (
    FREE,
    LABEL_NAME,
    Parameters,
    RequestedOutput,
    Signature,
    TensorSpec,
    check_no_shared_memory,
    classified,
    named,
    requested_output,
)
from inference_service.domain.tensors import (
    MAX_DIMENSIONS,
    Array,
    WireTensor,
    decode_ahead,
    encode_raw,
    encode_typed,
    has_typed_form,
)
from inference_service.serve.models import Answer
from shared.errors import MillraceError, check_count, invalid_field
from shared.grpc_errors import status_code

# --- Messages ---
# Between the messages of the Open Inference Protocol and plain values.

# Of each map.
MAX_PARAMETERS = 64
# So many beyond those of the model.
TOO_MANY_TENSORS = 100
# Numbers that are put into a message in one go, while no other thread can run.
TYPED_AT_ONCE = 64 * 1024
PLATFORM = "millrace_pytorch"
LINEAGE = (
    *("dataset_version", "training_job", "checkpoint", "checkpoint_sha256", "deployment", "model_version"),
    "code_bundle",
)


def check_tensor_counts(request: pb.ModelInferRequest, signature: Signature | None) -> None:
    """Raises `InvalidArgument` for far more tensors than the model takes and gives: each costs time to look at, so this
    comes before any of that. Of a few too many, a later look says which is wrong."""
    inputs, outputs = (0, 0) if signature is None else (signature.max_inputs, len(signature.offered))
    remedy = f"the model takes at most {inputs} tensors"
    check_count("inputs", request.inputs, inputs + TOO_MANY_TENSORS, remedy)
    check_count("raw_input_contents", request.raw_input_contents, inputs + TOO_MANY_TENSORS, remedy)
    check_count("outputs", request.outputs, outputs + TOO_MANY_TENSORS, f"the model gives {outputs}")


def inputs_from_proto(request: pb.ModelInferRequest) -> list[WireTensor]:
    """Raises `InvalidArgument` where raw contents do not pair with inputs, or a tensor would be in shared memory.

    Tensors themselves are checked later.
    """
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        check_no_shared_memory(field, tensor.name, parameters_from_proto(tensor.parameters, f"{field}.parameters"))
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
            # One more than there may be tells that there are too many.
            shape=tuple(tensor.shape[: MAX_DIMENSIONS + 1]),
            raw=raw[index] if raw else None,
            typed={field.name: values for field, values in tensor.contents.ListFields()},
        )
        for index, tensor in enumerate(request.inputs)
    ]


def outputs_from_proto(request: pb.ModelInferRequest) -> list[RequestedOutput]:
    """Raises `InvalidArgument` for an output's parameters."""
    return [
        requested_output(
            f"outputs[{index}]", output.name, parameters_from_proto(output.parameters, f"outputs[{index}].parameters")
        )
        for index, output in enumerate(request.outputs)
    ]


def parameters_from_proto(parameters: Mapping[str, pb.InferParameter], field: str = "parameters") -> Parameters:
    """Without those that have no value. Raises `InvalidArgument` naming `field` where there are too many."""
    if not parameters:
        return {}
    check_count(field, parameters, MAX_PARAMETERS)
    chosen = ((name, one, one.WhichOneof("parameter_choice")) for name, one in parameters.items())
    return {name: getattr(one, field) for name, one, field in chosen if field}


def answer_to_proto(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput] = ()
) -> pb.ModelInferResponse:
    """Outputs in the form that the inputs had, raw or typed; classified where that is `requested`."""
    tops = {output.name: output.top for output in requested}
    outputs = [_in_words(*output, tops[output[0].name]) if tops else output for output in answer.outputs]
    response = pb.ModelInferResponse()
    response.CopyFrom(_lineage(*_lineage_of(answer)))
    response.model_name, response.model_version, response.id = request.model_name, answer.version.number, request.id
    typed = not request.raw_input_contents and all(has_typed_form(spec.datatype) for spec, _ in outputs)
    for spec, values in outputs:
        output = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=values.shape)
        if typed:
            flat = values.ravel()
            for start in range(0, flat.size, TYPED_AT_ONCE):
                field, elements = encode_typed(spec.datatype, flat[start : start + TYPED_AT_ONCE])
                getattr(output.contents, field).extend(elements)
        else:
            response.raw_output_contents.append(encode_raw(spec.datatype, values))
    return response


def streamed_answer(response: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """The answer as it stands in a stream; no request is answered twice, so it is the final one of its request."""
    streamed = pb.ModelStreamInferResponse(infer_response=response)
    streamed.infer_response.parameters["triton_final_response"].bool_param = True
    return streamed


def streamed_error(request: pb.ModelInferRequest, error: MillraceError) -> pb.ModelStreamInferResponse:
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    streamed = streamed_answer(answer)
    streamed.error_message = f"{status_code(error).name}: {error.message}"
    return streamed


def metadata_to_proto(deployment: Deployment, signature: Signature) -> pb.ModelMetadataResponse:
    """Lists the raw form, a tensor for each column; the prepared one, and flags of nulls, are accepted too. Of the
    versions, those that may be asked for by number: loaded, and not on their way out."""
    return pb.ModelMetadataResponse(
        name=deployment.model_name,
        versions=[one.number for one in deployment.versions if one.signature is not None and one.retired_at is None],
        platform=PLATFORM,
        inputs=[_tensor(given) for given in signature.raw],
        outputs=[_tensor(output) for output in signature.offered],
    )


def _in_words(spec: TensorSpec, values: Array, top: int) -> tuple[TensorSpec, Array]:
    """Names of labels, and classifications; any other output as it is."""
    if spec.name == LABEL_NAME:
        return spec, named(values, spec.class_names)
    if not top:
        return spec, values
    return TensorSpec(spec.name, "BYTES", (FREE, FREE)), classified(values, top, spec.class_names)


def _lineage_of(answer: Answer) -> tuple[str, ...]:
    """In the order of `LINEAGE`."""
    version = answer.version
    return (
        version.dataset_version,
        version.training_job,
        version.checkpoint,
        version.checkpoint_sha256,
        answer.deployment.name,
        version.number,
        version.code_bundle,
    )


@functools.lru_cache(maxsize=256)
def _lineage(*values: str) -> pb.ModelInferResponse:
    """What all answers of a version begin with: the fields of `millrace.common.v1.Lineage`, as parameters."""
    response = pb.ModelInferResponse()
    for name, value in zip(LINEAGE, values, strict=True):
        if value or name != "code_bundle":  # which most models have not
            response.parameters[name].string_param = value
    return response


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


# --- Typed contents ---
# The numbers of large typed contents as arrays, so that no other request waits for them.
#
# Both ways may run in any thread, and let others run meanwhile. Numbers of a fixed size lie on the wire one after the
# other (packed), as protobuf has them in memory: the field is written once more, with hardly more than a copy, and its
# bytes are looked at as an array. 57 MiB of FP32 take 0.07 s of CPU that way, and 0.7 s number by number in one call,
# during which no other thread can run. Integers are varints on the wire: they are taken piece by piece, which is faster
# than to decode varints with numpy (0.08 s instead of 0.4 s for 3.2 million).

# Numbers that become an array within a millisecond, one by one.
FEW_ELEMENTS = 16 * 1024
# What numbers of a fixed size are in memory, and integers once they are read.
FIXED = {"bool_contents": "?", "fp32_contents": "<f4", "fp64_contents": "<f8"}
INTEGERS = {"int_contents": "<i8", "int64_contents": "<i8", "uint_contents": "<u8", "uint64_contents": "<u8"}


def many_elements(tensors: Sequence[WireTensor]) -> int:
    """How many elements typed contents have, where they take so long to decode that others should not wait for it; else
    0."""
    counts = [sum(map(len, tensor.typed.values())) for tensor in tensors]
    return sum(counts) if max(counts, default=0) > FEW_ELEMENTS else 0


def decode_typed(request: pb.ModelInferRequest, tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """`tensors`, which are those of the request, all `decoded`."""
    return [
        decode_ahead(replace(tensor, typed={**tensor.typed, **_array(given.contents, tensor)}))
        for given, tensor in zip(request.inputs, tensors, strict=True)
    ]


def _array(contents: pb.InferTensorContents, tensor: WireTensor) -> dict[str, Array]:
    """The only typed field as an array; nothing where there are several, which is wrong, or one that holds bytes."""
    if len(tensor.typed) != 1:
        return {}
    ((field, values),) = tensor.typed.items()
    if field in FIXED:
        return {field: _packed(contents, len(values), np.dtype(FIXED[field]))}
    if field not in INTEGERS:
        return {}
    array = np.empty(len(values), INTEGERS[field])
    for start in range(0, len(values), FEW_ELEMENTS):
        array[start : start + FEW_ELEMENTS] = values[start : start + FEW_ELEMENTS]
    return {field: array}


def _packed(contents: pb.InferTensorContents, count: int, dtype: np.dtype[np.generic]) -> Array:
    """The numbers of the only field that is set; what else follows are fields that we do not know."""
    data = contents.SerializeToString()
    # In front are the field's tag, of one byte, and its length as a varint, whose last byte is below 128.
    begin = next(at for at in range(1, len(data)) if data[at] < 0x80) + 1
    return np.frombuffer(data, dtype, count, begin)
