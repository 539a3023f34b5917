"""Converts between messages of the Open Inference Protocol and plain values."""

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

# The limit of each parameter map.
MAX_PARAMETERS = 64
# The excess over the model's own tensors that is refused at once.
TOO_MANY_TENSORS = 100
# The numbers that are put into a message in one call, which blocks all other threads.
TYPED_AT_ONCE = 64 * 1024
PLATFORM = "millrace_pytorch"
LINEAGE = (
    *("dataset_version", "training_job", "checkpoint", "checkpoint_sha256", "deployment", "model_version"),
    "code_bundle",
)


def check_tensor_counts(request: pb.ModelInferRequest, signature: Signature | None) -> None:
    """Raises `InvalidArgument` for far more tensors than the model has.

    Each tensor takes time to check, so this comes first. If there are only a few too many, a later check names the
    wrong one.
    """
    inputs, outputs = (0, 0) if signature is None else (signature.max_inputs, len(signature.offered))
    remedy = f"the model takes at most {inputs} tensors"
    check_count("inputs", request.inputs, inputs + TOO_MANY_TENSORS, remedy)
    check_count("raw_input_contents", request.raw_input_contents, inputs + TOO_MANY_TENSORS, remedy)
    check_count("outputs", request.outputs, outputs + TOO_MANY_TENSORS, f"the model gives {outputs}")


def inputs_from_proto(request: pb.ModelInferRequest) -> list[WireTensor]:
    """Returns the input tensors, which are not yet checked themselves.

    Raises `InvalidArgument` if the raw contents do not match the inputs, or a tensor is in shared memory.
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
            # One dimension beyond the limit is enough to detect that there are too many.
            shape=tuple(tensor.shape[: MAX_DIMENSIONS + 1]),
            raw=raw[index] if raw else None,
            typed={field.name: values for field, values in tensor.contents.ListFields()},
        )
        for index, tensor in enumerate(request.inputs)
    ]


def outputs_from_proto(request: pb.ModelInferRequest) -> list[RequestedOutput]:
    """Returns the requested outputs; raises `InvalidArgument` for an output's parameters."""
    return [
        requested_output(
            f"outputs[{index}]", output.name, parameters_from_proto(output.parameters, f"outputs[{index}].parameters")
        )
        for index, output in enumerate(request.outputs)
    ]


def parameters_from_proto(parameters: Mapping[str, pb.InferParameter], field: str = "parameters") -> Parameters:
    """Returns the parameters that have a value.

    Raises `InvalidArgument` naming `field` if there are too many.
    """
    if not parameters:
        return {}
    check_count(field, parameters, MAX_PARAMETERS)
    chosen = ((name, parameter, parameter.WhichOneof("parameter_choice")) for name, parameter in parameters.items())
    return {name: getattr(one, field) for name, one, field in chosen if field}


def answer_to_proto(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput] = ()
) -> pb.ModelInferResponse:
    """Converts an answer.

    Outputs are raw or typed like the inputs, and classified if `requested`.
    """
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
    """Returns the answer as a message of a stream.

    No request has several answers, so it is marked as the final one.
    """
    streamed = pb.ModelStreamInferResponse(infer_response=response)
    streamed.infer_response.parameters["triton_final_response"].bool_param = True
    return streamed


def streamed_error(request: pb.ModelInferRequest, error: MillraceError) -> pb.ModelStreamInferResponse:
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    streamed = streamed_answer(answer)
    streamed.error_message = f"{status_code(error).name}: {error.message}"
    return streamed


def metadata_to_proto(deployment: Deployment, signature: Signature) -> pb.ModelMetadataResponse:
    """Returns a model's metadata.

    Inputs are in the raw form, a tensor for each column; the prepared form and null flags are accepted, too. Versions
    are those that can be requested by number: loaded, and not retired.
    """
    return pb.ModelMetadataResponse(
        name=deployment.model_name,
        versions=[
            version.number
            for version in deployment.versions
            if version.signature is not None and version.retired_at is None
        ],
        platform=PLATFORM,
        inputs=[_tensor(given) for given in signature.raw],
        outputs=[_tensor(output) for output in signature.offered],
    )


def _in_words(spec: TensorSpec, values: Array, top: int) -> tuple[TensorSpec, Array]:
    """Converts label names and classifications to text; leaves other outputs as they are."""
    if spec.name == LABEL_NAME:
        return spec, named(values, spec.class_names)
    if not top:
        return spec, values
    return TensorSpec(spec.name, "BYTES", (FREE, FREE)), classified(values, top, spec.class_names)


def _lineage_of(answer: Answer) -> tuple[str, ...]:
    """Returns the values in the order of `LINEAGE`."""
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
    """Returns the common start of a version's answers.

    It has the fields of `millrace.common.v1.Lineage` as parameters.
    """
    response = pb.ModelInferResponse()
    for name, value in zip(LINEAGE, values, strict=True):
        if value or name != "code_bundle":  # most models have no code bundle
            response.parameters[name].string_param = value
    return response


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


# --- Typed contents ---
# Decodes large typed contents to arrays, so that no other request waits for them.
#
# Both ways may run in any thread, and let others run meanwhile. Fixed-size numbers are packed on the wire, in the same
# layout as in protobuf's memory. So the field is serialized again, at hardly more than the cost of a copy, and an array
# views its bytes. For 57 MiB of FP32 that takes 0.07 s of CPU, while reading number by number takes 0.7 s in one call,
# during which no other thread can run. Integers are varints on the wire: they are read piece by piece, which is faster
# than to decode varints with numpy (0.08 s instead of 0.4 s for 3.2 million).

# The numbers that are converted to an array within a millisecond, one by one.
FEW_ELEMENTS = 16 * 1024
# The memory layout of fixed-size numbers, and of integers once they are read.
FIXED = {"bool_contents": "?", "fp32_contents": "<f4", "fp64_contents": "<f8"}
INTEGERS = {"int_contents": "<i8", "int64_contents": "<i8", "uint_contents": "<u8", "uint64_contents": "<u8"}


def many_elements(tensors: Sequence[WireTensor]) -> int:
    """Returns the number of typed elements if they take long to decode; else 0."""
    counts = [sum(map(len, tensor.typed.values())) for tensor in tensors]
    return sum(counts) if max(counts, default=0) > FEW_ELEMENTS else 0


def decode_typed(request: pb.ModelInferRequest, tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """Returns the request's `tensors`, all `decoded`."""
    return [
        decode_ahead(replace(tensor, typed={**tensor.typed, **_array(given.contents, tensor)}))
        for given, tensor in zip(request.inputs, tensors, strict=True)
    ]


def _array(contents: pb.InferTensorContents, tensor: WireTensor) -> dict[str, Array]:
    """Returns the only typed field as an array.

    Returns nothing if there are several, which is an error, or if it holds bytes.
    """
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
    """Returns the numbers of the only known field; unknown fields may follow it."""
    data = contents.SerializeToString()
    # The data begins with the field's tag, one byte, and its length as a varint, whose last byte is below 128.
    begin = next(at for at in range(1, len(data)) if data[at] < 0x80) + 1
    return np.frombuffer(data, dtype, count, begin)
