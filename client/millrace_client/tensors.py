"""numpy arrays on the wire of the Open Inference Protocol, as raw contents."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from inference import grpc_service_pb2 as pb

# Row-major and little-endian, as the protocol wants raw contents. BF16 has no type in numpy.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")
# What an int64 holds.
_MAX_MICROSECONDS = 2**63 - 1


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its tensors: see `infer_request`."""

    version: str
    outputs: Mapping[str, int] | None
    priority: int
    server_timeout_s: float | None
    headers: Mapping[str, str] | None


def infer_request(
    model: str,
    inputs: Mapping[str, npt.ArrayLike],
    *,
    version: str = "",
    request_id: str = "",
    outputs: Mapping[str, int] | None = None,
    priority: int = 0,
    server_timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> pb.ModelInferRequest:
    """One request. `outputs` are asked for, or all where none is named: 0 for the tensor itself, else for so many of
    each row's greatest numbers, as strings "value:index:name" (Triton's classification).

    `priority` is 1, the most urgent, to 10; 0 is the server's default. `server_timeout_s` is the time from the
    request's arrival in which the server must answer it. `headers` may lead it to a version, where the deployment has
    routes by header; it is of no use together with `version`.

    Bytes and text go whole out of lists and arrays of objects. An array of numpy's own strings has already lost the
    zeros that they ended in.

    Raises `TypeError` for an array of a type that the protocol does not have, and for an object that is neither text
    nor bytes; and `ValueError` for a `server_timeout_s` that is not above 0 and finite.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    if priority:
        request.parameters["priority"].int64_param = priority
    if server_timeout_s is not None:
        if not 0 < server_timeout_s * 1e6 < _MAX_MICROSECONDS:
            raise ValueError(f"server_timeout_s is {server_timeout_s}: use a finite number of seconds above 0, or None")
        # Rounded up: 0 microseconds are no limit.
        request.parameters["timeout"].int64_param = math.ceil(server_timeout_s * 1e6)
    if headers:
        request.parameters["headers"].string_param = json.dumps(dict(headers))
    for name, value in inputs.items():
        array = _array(value)
        datatype, raw = _encode(name, array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    for name, top in (outputs or {}).items():
        wanted = request.outputs.add(name=name)
        if top:
            wanted.parameters["classification"].int64_param = top
    return request


def output_arrays(response: pb.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """The outputs by name. Those that came as raw contents are read-only views of the message."""
    arrays = {}
    for index, tensor in enumerate(response.outputs):
        shape = tuple(tensor.shape)
        if response.raw_output_contents:
            arrays[tensor.name] = _decode(tensor.datatype, response.raw_output_contents[index], shape)
        else:
            arrays[tensor.name] = _typed(tensor).reshape(shape)
    return arrays


def _array(value: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if isinstance(value, np.ndarray) or array.dtype.kind not in "SU":
        return array
    # numpy's own strings end before their last zeros, and have made text of numbers among them.
    return np.array(value, dtype=object)


def _encode(name: str, array: npt.NDArray[Any]) -> tuple[str, bytes]:
    if array.dtype.kind in "OSU":
        elements = [_bytes(name, one) for one in array.reshape(-1)]
        return "BYTES", b"".join(_LENGTH.pack(len(one)) + one for one in elements)
    little = array.dtype.newbyteorder("<")
    datatype = _NAMES.get(little)
    if datatype is None:
        raise TypeError(f"input {name!r}: the protocol has no type for {array.dtype}; use one of {', '.join(DTYPES)}")
    return datatype, array.astype(little, copy=False).tobytes()


def _bytes(name: str, element: object) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, bytes | bytearray | memoryview):
        return bytes(element)
    raise TypeError(f"input {name!r}: an element is {element!r:.40}; give text or bytes, or an array of numbers")


def _decode(datatype: str, raw: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if datatype == "BYTES":
        elements, at = [], 0
        while at < len(raw):
            (length,) = _LENGTH.unpack_from(raw, at)
            elements.append(raw[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
        return np.array(elements, dtype=object).reshape(shape)
    return np.frombuffer(raw, dtype=DTYPES[datatype]).reshape(shape)


def _typed(tensor: pb.ModelInferResponse.InferOutputTensor) -> npt.NDArray[Any]:
    """Contents that came in typed fields, as servers other than ours may send them."""
    dtype = DTYPES.get(tensor.datatype, np.dtype(object))
    (values,) = (value for _, value in tensor.contents.ListFields()) if tensor.contents.ListFields() else ([],)
    return np.array(list(values), dtype=dtype)
