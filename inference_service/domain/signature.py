"""What a model takes and gives, and whether a request fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inference_service.domain.tensors import Array, WireTensor, decode
from shared.errors import InvalidArgument, invalid_field

FREE = -1  # a dimension that the request chooses
MAX_SHOWN_NAME = 100


@dataclass(frozen=True)
class TensorSpec:
    """One tensor; the first dimension of `shape` is always the rows, `FREE`."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def fits(self, datatype: str, shape: Sequence[int]) -> bool:
        return (
            datatype == self.datatype
            and len(shape) == len(self.shape)
            and all(want in (FREE, size) for want, size in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """`raw` is one row form as the dataset has it; `prepared` the same input after the checkpoint's preprocessing.

    Metadata lists the raw form alone: the prepared one is for clients that did the preprocessing themselves.
    """

    raw: TensorSpec
    prepared: TensorSpec
    outputs: tuple[TensorSpec, ...]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Signature:
        return Signature(
            _spec(record["raw"]), _spec(record["prepared"]), tuple(_spec(output) for output in record["outputs"])
        )


def _spec(record: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(record["name"], record["datatype"], tuple(record["shape"]))


@dataclass(frozen=True)
class Rows:
    """The rows of one request: `values` has them along its first axis; `form` is `raw` or `prepared`."""

    form: str
    values: Array

    def __len__(self) -> int:
        return len(self.values)


def rows_of(signature: Signature, tensors: Sequence[WireTensor], max_rows: int) -> Rows:
    """The request's input, decoded and fitted to the model; `InvalidArgument` names the tensor that does not fit."""
    known = signature.raw.name
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name != known:
            raise invalid_field(f"{tensor.field}.name", tensor.name[:MAX_SHOWN_NAME], f"the model's input is {known!r}")
        if tensor.name in seen:
            raise invalid_field(f"{tensor.field}.name", tensor.name, "this tensor is given twice")
        seen.add(tensor.name)
    if not tensors:
        raise invalid_field("inputs", [], f"tensor {known!r} is missing")
    tensor = tensors[0]
    values = decode(tensor)
    if signature.raw.fits(tensor.datatype, tensor.shape):
        form = "raw"
    elif signature.prepared.fits(tensor.datatype, tensor.shape):
        form = "prepared"
    else:
        raise _misfit(signature, tensor)
    if not 1 <= len(values) <= max_rows:
        raise invalid_field(
            f"{tensor.field}.shape", list(tensor.shape), f"tensor {known!r}: send 1 to {max_rows} rows in one request"
        )
    return Rows(form, values)


def _misfit(signature: Signature, tensor: WireTensor) -> InvalidArgument:
    datatypes = (signature.raw.datatype, signature.prepared.datatype)
    part, value = (
        ("shape", str(list(tensor.shape[:8]))) if tensor.datatype in datatypes else ("datatype", tensor.datatype)
    )
    return invalid_field(
        f"{tensor.field}.{part}",
        value,
        f"tensor {tensor.name!r}: send {signature.raw} (raw rows) or {signature.prepared} (prepared)",
    )


def outputs_wanted(signature: Signature, requested: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The outputs to send, in the order asked for; all of them where none is named."""
    if not requested:
        return signature.outputs
    known = {output.name: output for output in signature.outputs}
    for index, name in enumerate(requested):
        field = f"outputs[{index}].name"
        if name not in known:
            raise invalid_field(field, name[:MAX_SHOWN_NAME], f"the model's outputs are {', '.join(known)}")
        if name in requested[:index]:
            raise invalid_field(field, name, "this output is asked for twice")
    return tuple(known[name] for name in requested)
