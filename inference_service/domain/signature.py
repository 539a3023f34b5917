"""The tensors of the Open Inference Protocol, the signature of a model, and the check of a request against it.

Tensors have datatypes, and are converted between their two wire forms and numpy, which refuses malformed tensors. A
request has rows, tensors by name, and parameters; an answer can be text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidArgument, MillraceError, invalid_field

# --- Datatypes ---
# The datatypes of the Open Inference Protocol and their numpy counterparts.


@dataclass(frozen=True)
class Datatype:
    """A datatype of the protocol.

    `dtype` is the little-endian dtype of its arrays in memory; `item_bytes` the size of an element on the wire, 0 if it
    varies; `contents_field` the typed field of InferTensorContents, "" if only raw is defined.
    """

    name: str
    dtype: np.dtype[np.generic]
    item_bytes: int
    contents_field: str

    @property
    def is_integer(self) -> bool:
        return self.dtype.kind in "iu"


def _datatype(name: str, dtype: str, item_bytes: int, contents_field: str) -> Datatype:
    return Datatype(name, np.dtype(dtype), item_bytes, contents_field)


DATATYPES: dict[str, Datatype] = {
    datatype.name: datatype
    for datatype in (
        _datatype("BOOL", "?", 1, "bool_contents"),
        _datatype("UINT8", "u1", 1, "uint_contents"),
        _datatype("UINT16", "<u2", 2, "uint_contents"),
        _datatype("UINT32", "<u4", 4, "uint_contents"),
        _datatype("UINT64", "<u8", 8, "uint64_contents"),
        _datatype("INT8", "i1", 1, "int_contents"),
        _datatype("INT16", "<i2", 2, "int_contents"),
        _datatype("INT32", "<i4", 4, "int_contents"),
        _datatype("INT64", "<i8", 8, "int64_contents"),
        _datatype("FP16", "<f2", 2, ""),
        _datatype("FP32", "<f4", 4, "fp32_contents"),
        _datatype("FP64", "<f8", 8, "fp64_contents"),
        # numpy has no bfloat16: such tensors are float32 in memory, which holds every bfloat16 exactly.
        _datatype("BF16", "<f4", 2, ""),
        _datatype("BYTES", "O", 0, "bytes_contents"),
    )
}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the datatype of these numbers; None if the protocol has none."""
    little = dtype.newbyteorder("<")
    exact = (name for name, one in DATATYPES.items() if one.dtype == little and name not in ("BF16", "BYTES"))
    return next(exact, None)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert bfloat16 bit patterns, any shape, to float32, exactly."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def float32_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert float32 to bfloat16 bit patterns, rounding half to even.

    A NaN stays a NaN and keeps its upper bits.
    """
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")
    upper = (bits >> np.uint32(16)).astype("<u2")
    # Truncating a NaN whose payload is all in the lower bits would give an infinity.
    quiet = np.where(upper & np.uint16(0x7F), upper, upper | np.uint16(0x40))
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


# --- Tensors ---
# Converts tensors of the Open Inference Protocol between their two wire forms and numpy, refusing malformed ones.
#
# A tensor is sent either *raw* (row-major little-endian bytes; each BYTES element behind its 4-byte length) or *typed*
# (a repeated field of its own kind). Raw numbers become arrays that view the message's own bytes, without a copy.

Array = npt.NDArray[Any]

MAX_DIMENSIONS = 32  # numpy allows 64
MAX_ELEMENTS = 2**40  # far above any message, far below where sizes would overflow
MAX_SHOWN_SHAPE = 8


@dataclass(frozen=True)
class WireTensor:
    """One tensor as it was received.

    `raw` has its bytes or None. `typed` has its non-empty typed fields, each a repeated field, or already an array of
    64-bit integers or of the field's own kind. `field` is its path in the request, for errors. `decoded` is the result
    of `decode`, array or error, if it is already known.
    """

    field: str
    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes | None
    typed: Mapping[str, Sequence[Any] | Array]
    decoded: Array | InvalidArgument | None = None


def decode_ahead(tensor: WireTensor) -> WireTensor:
    """Return the same tensor, `decoded`.

    Raises nothing: the later caller of `decode` may find another error first.
    """
    try:
        return replace(tensor, decoded=decode(tensor))
    except InvalidArgument as error:
        return replace(tensor, decoded=error)


def decode(tensor: WireTensor) -> Array:
    """Return the tensor as an array of its shape; read-only if it views the message.

    BOOL is bool, BF16 float32, BYTES an object array of bytes. Raises `InvalidArgument`, naming the tensor, for an
    unknown datatype, dimensions below zero or overflowing, both contents at once, contents of another kind, too few or
    too many elements, numbers out of the datatype's range, and BYTES lengths that do not fit the bytes.
    """
    if tensor.decoded is not None:
        if isinstance(tensor.decoded, InvalidArgument):
            raise tensor.decoded
        return tensor.decoded
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise _bad(tensor, "datatype", tensor.datatype, f"use one of {', '.join(DATATYPES)}")
    elements = check_shape(tensor)
    if tensor.raw is not None:
        if tensor.typed:
            raise _bad(tensor, "contents", sorted(tensor.typed), "send contents or raw_input_contents, not both")
        flat = _decode_raw(tensor, datatype, elements, tensor.raw)
    else:
        flat = _decode_typed(tensor, datatype, elements)
    return flat.reshape(tuple(tensor.shape))


def encode_raw(datatype: str, values: Array) -> bytes:
    """Return the array in raw form.

    `values` has the datatype's own dtype: float32 for BF16, bytes objects for BYTES.
    """
    kind = DATATYPES[datatype]
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(item)) + item for item in values.ravel())
    if datatype == "BF16":
        return float32_to_bfloat16(values).tobytes()
    return np.ascontiguousarray(values, kind.dtype).tobytes()


def encode_typed(datatype: str, values: Array) -> tuple[str, list[Any]]:
    """Return (field of InferTensorContents, elements in row-major order).

    FP16 and BF16 have no typed form.
    """
    kind = DATATYPES[datatype]
    if not kind.contents_field:
        raise ValueError(f"{datatype} has only a raw form")
    return kind.contents_field, values.ravel().tolist()


def has_typed_form(datatype: str) -> bool:
    return bool(DATATYPES[datatype].contents_field)


def check_shape(tensor: WireTensor) -> int:
    """Return the number of elements.

    Raises `InvalidArgument` for dimensions that are below zero, overflow, or are too many.
    """
    shape = tensor.shape
    shown = list(shape[:MAX_SHOWN_SHAPE])
    if len(shape) > MAX_DIMENSIONS:
        raise _bad(tensor, "shape", shown, f"there are more than {MAX_DIMENSIONS} dimensions")
    if any(size < 0 for size in shape):
        raise _bad(tensor, "shape", shown, "every dimension must be 0 or more")
    # Zeros count as ones: numpy refuses a shape whose other dimensions overflow, even for an empty array.
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise _bad(tensor, "shape", shown, f"it names more than {MAX_ELEMENTS} elements")
    return math.prod(shape)


def _decode_raw(tensor: WireTensor, datatype: Datatype, elements: int, raw: bytes) -> Array:
    if datatype.name == "BYTES":
        return _objects(_split_bytes(tensor, raw, elements))
    wanted = elements * datatype.item_bytes
    if len(raw) != wanted:
        raise _bad(
            tensor,
            "raw_input_contents",
            f"{len(raw)} bytes",
            f"shape {list(tensor.shape)} of {datatype.name} takes {wanted} bytes",
        )
    if datatype.name == "BF16":
        return bfloat16_to_float32(np.frombuffer(raw, "<u2"))
    if datatype.name == "BOOL":
        # A byte other than 0 and 1 would give a bool that equals neither.
        flags = np.frombuffer(raw, "u1")
        if flags.size and flags.max() > 1:
            raise _bad(tensor, "raw_input_contents", int(flags.max()), "a BOOL is the byte 0 or 1")
    return np.frombuffer(raw, datatype.dtype)


def _split_bytes(tensor: WireTensor, raw: bytes, elements: int) -> list[bytes]:
    items: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if offset + 4 > len(raw):
            raise _bad(tensor, "raw_input_contents", f"{len(raw)} bytes", "they end inside the length of an element")
        (length,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        if offset + length > len(raw):
            raise _bad(
                tensor,
                "raw_input_contents",
                f"length {length}",
                f"element {len(items)} reaches beyond the {len(raw)} bytes that were sent",
            )
        if len(items) == elements:
            raise _bad(tensor, "raw_input_contents", f"{len(raw)} bytes", f"there are more than {elements} elements")
        items.append(raw[offset : offset + length])
        offset += length
    if len(items) != elements:
        raise _bad(
            tensor, "raw_input_contents", f"{len(items)} elements", f"shape {list(tensor.shape)} takes {elements}"
        )
    return items


def _decode_typed(tensor: WireTensor, datatype: Datatype, elements: int) -> Array:
    field = datatype.contents_field
    if not field:
        raise _bad(tensor, "contents", datatype.name, "this datatype has no typed contents: use raw_input_contents")
    strangers = sorted(set(tensor.typed) - {field})
    if strangers:
        raise _bad(tensor, "contents", strangers, f"{datatype.name} goes into {field}")
    values = tensor.typed.get(field, ())
    if len(values) != elements:
        raise _bad(
            tensor, f"contents.{field}", f"{len(values)} elements", f"shape {list(tensor.shape)} takes {elements}"
        )
    if datatype.name == "BYTES":
        return _objects([bytes(value) for value in values])
    if not datatype.is_integer:
        return _numbers(values, datatype.dtype).astype(datatype.dtype, copy=False)
    wide = _numbers(values, np.dtype("<u8" if datatype.dtype.kind == "u" else "<i8"))
    limits = np.iinfo(np.dtype(datatype.dtype.str))
    if elements and (wide.min() < limits.min or wide.max() > limits.max):
        outlier = wide.min() if wide.min() < limits.min else wide.max()
        raise _bad(tensor, f"contents.{field}", int(outlier), f"{datatype.name} holds {limits.min} to {limits.max}")
    return wide.astype(datatype.dtype)


def _numbers(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    return values if isinstance(values, np.ndarray) else np.fromiter(values, dtype, len(values))


def _objects(items: list[bytes]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _bad(tensor: WireTensor, part: str, value: object, remedy: str) -> InvalidArgument:
    return invalid_field(f"{tensor.field}.{part}", value, f"tensor {tensor.name[:100]!r}: {remedy}")


# --- Rows ---
# The rows that are sent to a model, gathered from several requests into batches, and their outputs.

RAW, PREPARED = "raw", "prepared"
# The number of bad rows of a request that an error lists individually.
MAX_SHOWN_ROWS = 10


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of input tensors.

    `form` says which inputs the caller sent. RAW: the columns of the dataset, to which the replica applies the
    checkpoint's transform. PREPARED: the model's own input tensor, as the transform would make it. A batch has rows of
    one form.

    `values` has each input tensor's rows along its first axis. `nulls` has, for some
    tensors, where they are null: bool (rows,); the content of `values` there is undefined. `trace` has the W3C trace
    headers of the span for rows sent to a replica, if it is recorded. `size_bytes` is the approximate memory of a
    request's rows.
    """

    form: str
    values: Mapping[str, Array]
    nulls: Mapping[str, Array] = field(default_factory=dict)
    trace: Mapping[str, str] | None = None
    requests: tuple[int, ...] = ()
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def slice(self, start: int, stop: int) -> Rows:
        """Return the rows `start` to `stop`, without a copy."""
        values = {name: whole[start:stop] for name, whole in self.values.items()}
        nulls = {name: flags[start:stop] for name, flags in self.nulls.items()}
        return Rows(self.form, values, nulls, size_bytes=sum(map(bytes_of, values.values())))

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Concatenate the rows of all parts, which have one form and one model."""
        if len(parts) == 1:
            return parts[0]
        names = {name: None for part in parts for name in part.nulls}
        return Rows(
            parts[0].form,
            {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
            {
                name: np.concatenate([part.nulls.get(name, np.zeros(len(part), np.bool_)) for part in parts])
                for name in names
            },
            requests=tuple(map(len, parts)),
        )


def bytes_of(values: Array) -> int:
    """Return the bytes of an array; for an object array, the bytes of its elements."""
    return sum(map(len, values.flat)) if values.dtype.kind == "O" else values.nbytes


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a model for some rows: one array an output, rows along the first axis.

    `refused` has the problems of bad rows by row index, and `failed` the errors of rows that failed through no fault of
    theirs; the arrays' content there is undefined. `input_s` and `infer_s` are the preprocessing and compute times of
    the whole batch. `sent_again` is True if a first replica died with it, so its round trip says nothing about other
    batches. `non_finite` are the indices of rows answered with a NaN or an infinity.
    """

    arrays: Sequence[Array]
    refused: Mapping[int, str] = field(default_factory=dict)
    input_s: float = 0.0
    infer_s: float = 0.0
    sent_again: bool = False
    failed: Mapping[int, MillraceError] = field(default_factory=dict)
    non_finite: Sequence[int] = ()

    def slice(self, start: int, stop: int) -> Outputs:
        return Outputs(
            [array[start:stop] for array in self.arrays],
            {row - start: why for row, why in self.refused.items() if start <= row < stop},
            failed={row - start: error for row, error in self.failed.items() if start <= row < stop},
            non_finite=[row - start for row in self.non_finite if start <= row < stop],
        )

    def checked(self, first_row: int = 0) -> Sequence[Array]:
        """Return the arrays.

        Raises `InvalidArgument` naming the refused rows, counted from `first_row`, or else the error of the first
        failed row.
        """
        if not self.refused and not self.failed:
            return self.arrays
        if not self.refused:
            raise self.failed[min(self.failed)]
        problems = [f"row {first_row + row}: {why}" for row, why in sorted(self.refused.items())]
        more = len(problems) - MAX_SHOWN_ROWS
        shown = problems[:MAX_SHOWN_ROWS] + ([f"and {more} rows more"] if more > 0 else [])
        raise InvalidArgument(
            "; ".join(shown),
            reason="BAD_ROW",
            metadata={"row": str(first_row + min(self.refused))},
            fields=[("inputs", problem) for problem in shown],
        )


# --- Signature ---

FREE = -1  # a dimension that the request chooses
MAX_SHOWN_NAME = 100
# `age.null` has the null flags of `age`.
NULLS = ".null"
LABEL, LABEL_NAME = "label", "label_name"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor.

    The first dimension of `shape` is always the rows, `FREE`. `nullable`: its rows may be null. `class_names` names the
    numbers of a row, if they have names. `column_type` is Arrow's name of a date or time column's type, such as
    timestamp[us]. Tensors are equal regardless of these two.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nullable: bool = False
    class_names: tuple[str, ...] = field(default=(), compare=False)
    column_type: str = field(default="", compare=False)

    def fits(self, datatype: str, shape: Sequence[int]) -> bool:
        return (
            datatype == self.datatype
            and len(shape) == len(self.shape)
            and all(want in (FREE, size) for want, size in zip(self.shape, shape, strict=True))
        )

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of one row in a message.

        For class names, the maximum; 0 if it varies.
        """
        if self.name == LABEL_NAME and self.class_names:
            return 4 + max(len(name.encode()) for name in self.class_names)  # with its length prefix
        return DATATYPES[self.datatype].item_bytes * math.prod(max(size, 0) for size in self.shape[1:])

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model.

    `raw` is the row form as ingested: a tensor for each column of the model's input. `prepared` is the other form: the
    model's input itself; None for a model of several inputs, which takes raw rows only. Metadata lists the raw form
    only, since the prepared form is for clients that do the preprocessing themselves.

    The protocol's tensors have no nulls. So a request may send, with a nullable tensor, a BOOL tensor of shape [rows]
    with the same name plus `NULLS`: true where the row is null. Without it, no row is null. The replica decides what
    NaN means.
    """

    raw: tuple[TensorSpec, ...]
    prepared: TensorSpec | None
    outputs: tuple[TensorSpec, ...]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Signature:
        return Signature(
            tuple(_spec(given) for given in record["raw"]),
            None if record["prepared"] is None else _spec(record["prepared"]),
            tuple(_spec(output) for output in record["outputs"]),
        )

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors of raw rows."""
        return {spec.name: spec for spec in self.raw}

    @property
    def prepared_name(self) -> str | None:
        return None if self.prepared is None else self.prepared.name

    @cached_property
    def null_flags(self) -> dict[str, TensorSpec]:
        """The null-flag tensors, by the name of the nullable tensor.

        A column with the same name takes precedence.
        """
        taken = self.by_name
        flags = [TensorSpec(spec.name + NULLS, "BOOL", (FREE,)) for spec in self.raw if spec.nullable]
        return {spec.name: spec for spec in flags if spec.name not in taken}

    @cached_property
    def offered(self) -> tuple[TensorSpec, ...]:
        """The `outputs`, followed by those sent only on request: the label names of a classifier with class names."""
        names = next((output.class_names for output in self.outputs if output.class_names), ())
        if not names or all(one.name != LABEL for one in self.outputs):
            return self.outputs
        return (*self.outputs, TensorSpec(LABEL_NAME, "BYTES", (FREE,), class_names=names))

    @cached_property
    def max_inputs(self) -> int:
        """The maximum tensors of a request: raw rows with all null flags, or the prepared input."""
        return max(len(self.raw) + len(self.null_flags), 1)

    @cached_property
    def answer_row_bytes(self) -> int:
        """The maximum bytes of one row of all outputs in a message, without outputs of varying size."""
        return sum(spec.row_bytes for spec in self.offered)


def _spec(record: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(
        record["name"],
        record["datatype"],
        tuple(record["shape"]),
        record["nullable"],
        tuple(record.get("class_names", ())),
        record.get("column_type", ""),
    )


def rows_of(
    signature: Signature,
    tensors: Sequence[WireTensor],
    max_rows: int,
    admit: Callable[[int, str], None] = lambda _rows, _form: None,
) -> Rows:
    """Decode the request's input and fit it to the model.

    Raises `InvalidArgument` naming the tensor that does not fit. `admit` is called with the number of rows and their
    form after names and shapes are checked, and before the tensors are decoded, which may take much longer. It raises
    to refuse the rows.
    """
    given, rows, form = _fitted(signature, tensors, max_rows)
    admit(rows, form)
    values = {name: decode(tensor) for name, tensor in given.items()}
    size_bytes = _size_bytes(given, values)
    if form == PREPARED:
        return Rows(PREPARED, values, size_bytes=size_bytes)
    nulls = {name.removesuffix(NULLS): values.pop(name) for name in signature.null_flags if name in values}
    nulls = {name: where for name, where in nulls.items() if where.any()}
    return Rows(RAW, values, nulls, size_bytes=size_bytes)


def count_rows(signature: Signature, tensors: Sequence[WireTensor], max_rows: int) -> tuple[int, str]:
    """Return the number of rows and the form that `rows_of` would return.

    Raises the same errors, except those about the contents.
    """
    _, rows, form = _fitted(signature, tensors, max_rows)
    return rows, form


def _fitted(
    signature: Signature, tensors: Sequence[WireTensor], max_rows: int
) -> tuple[dict[str, WireTensor], int, str]:
    """Return the tensors by name, their number of rows, and their form."""
    wanted = signature.by_name
    flags = signature.null_flags
    given: dict[str, WireTensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise invalid_field(f"{tensor.field}.name", tensor.name[:MAX_SHOWN_NAME], "this tensor is given twice")
        if tensor.name not in wanted and tensor.name not in flags and tensor.name != signature.prepared_name:
            raise invalid_field(f"{tensor.field}.name", tensor.name[:MAX_SHOWN_NAME], _inputs(signature))
        given[tensor.name] = tensor
    if not given:
        raise invalid_field("inputs", [], f"tensor {signature.raw[0].name!r} is missing: {_inputs(signature)}")
    if _is_prepared(signature, given):
        return given, _rows_in(given, max_rows), PREPARED
    for name in wanted:
        if name not in given:
            raise invalid_field("inputs", list(given)[:MAX_SHOWN_NAME], f"tensor {name!r} is missing")
    for name, tensor in given.items():
        spec = wanted.get(name) or flags.get(name)
        if spec is None:
            raise invalid_field(
                f"{tensor.field}.name", name, f"send raw rows or the prepared input: {_inputs(signature)}"
            )
        if not spec.fits(tensor.datatype, tensor.shape):
            raise _misfit(signature, spec, tensor)
    return given, _rows_in(given, max_rows), RAW


def _is_prepared(signature: Signature, given: Mapping[str, WireTensor]) -> bool:
    """Return whether the rows are prepared; a tensor that fits both forms is raw."""
    prepared = signature.prepared
    if prepared is None or list(given) != [prepared.name]:
        return False
    tensor = given[prepared.name]
    namesakes = [spec for spec in signature.raw if spec.name == tensor.name]
    fits = prepared.fits(tensor.datatype, tensor.shape)
    if not fits and not namesakes:
        raise _misfit(signature, prepared, tensor)
    return fits and not any(spec.fits(tensor.datatype, tensor.shape) for spec in namesakes)


def _rows_in(given: Mapping[str, WireTensor], max_rows: int) -> int:
    """Return the number of rows, which must be equal for all tensors."""
    first = next(iter(given.values()))
    for name, tensor in given.items():
        check_shape(tensor)
        if not 1 <= tensor.shape[0] <= max_rows:
            remedy = f"tensor {name!r}: send 1 to {max_rows} rows in one request"
            raise invalid_field(f"{tensor.field}.shape", list(tensor.shape), remedy)
        if tensor.shape[0] != first.shape[0]:
            remedy = f"tensor {name!r} must have as many rows as {first.name!r}, {first.shape[0]}"
            raise invalid_field(f"{tensor.field}.shape", list(tensor.shape), remedy)
    return first.shape[0]


def _size_bytes(given: Mapping[str, WireTensor], decoded: Mapping[str, Array]) -> int:
    """Return the approximate memory, without reading each element if the raw bytes give it."""
    size = 0
    for name, tensor in given.items():
        values = decoded[name]
        size += bytes_of(values) if tensor.raw is None else max(len(tensor.raw), values.nbytes)
    return size


def _misfit(signature: Signature, spec: TensorSpec, tensor: WireTensor) -> InvalidArgument:
    """Return the error for a tensor that should match `spec`."""
    accepted = [(spec, "raw rows" if spec in signature.raw else "")]
    if signature.prepared and tensor.name == signature.prepared.name and spec != signature.prepared:
        accepted.append((signature.prepared, "prepared"))
    part, value = (
        ("shape", str(list(tensor.shape[:8])))
        if tensor.datatype in [one.datatype for one, _ in accepted]
        else ("datatype", tensor.datatype)
    )
    choices = " or ".join(f"{one} ({which})" if which else str(one) for one, which in accepted)
    return invalid_field(f"{tensor.field}.{part}", value, f"tensor {tensor.name!r}: send {choices}")


def _inputs(signature: Signature) -> str:
    names = ", ".join(repr(spec.name) for spec in signature.raw)
    return f"the model's input is {names}" if len(signature.raw) == 1 else f"the model's inputs are {names}"


def outputs_wanted(signature: Signature, requested: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return the outputs to send, in the order requested.

    If none is named, returns all but those sent only on request.
    """
    if not requested:
        return signature.outputs
    known = {output.name: output for output in signature.offered}
    for index, name in enumerate(requested):
        field = f"outputs[{index}].name"
        if name not in known:
            raise invalid_field(field, name[:MAX_SHOWN_NAME], f"the model's outputs are {', '.join(known)}")
        if name in requested[:index]:
            raise invalid_field(field, name, "this output is asked for twice")
    return tuple(known[name] for name in requested)


def check_answer_fits(tensor_specs: Sequence[TensorSpec], rows: int, max_bytes: int) -> None:
    """Raise `InvalidArgument` if these outputs exceed the bytes of an answer."""
    row_bytes = sum(spec.row_bytes for spec in tensor_specs)
    if rows * row_bytes > max_bytes:
        fewer = f"send at most {max_bytes // row_bytes} rows, or " if row_bytes <= max_bytes else ""
        remedy = f"an answer may have {max_bytes}; {fewer}ask for fewer outputs"
        raise invalid_field("outputs", f"{rows * row_bytes} bytes for {rows} rows", remedy)


# --- Request parameters ---
# The supported parameters of a request, of its tensors and of its requested outputs.
#
# Unsupported parameters are ignored, as in Triton, except for shared memory: its tensors would be missing.

Parameters = Mapping[str, object]

# 1 is the most urgent. A value above the last level means the default, as in Triton.
PRIORITY_LEVELS = 10
DEFAULT_PRIORITY = 5
SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request.

    `timeout_s` is the time in which it must be answered; None: no limit.
    """

    priority: int = DEFAULT_PRIORITY
    timeout_s: float | None = None


@dataclass(frozen=True)
class RequestedOutput:
    """A requested output.

    `top` is the number of greatest values of each row in a classification; 0: the output itself.
    """

    name: str
    top: int = 0


def request_options_of(parameters: Parameters) -> RequestOptions:
    """Return the request's options; raise `InvalidArgument` naming the parameter."""
    priority = _count("parameters", parameters, "priority", "use 1, the most urgent, to 10; 0 is the default")
    timeout_us = _count("parameters", parameters, "timeout", "use microseconds; 0 is no timeout")
    return RequestOptions(
        priority if 1 <= priority <= PRIORITY_LEVELS else DEFAULT_PRIORITY,
        timeout_us / 1e6 if timeout_us else None,
    )


def requested_output(field: str, name: str, parameters: Parameters) -> RequestedOutput:
    """Return a requested output; raise `InvalidArgument`.

    `field` is the output's path in the request.
    """
    check_no_shared_memory(field, name, parameters)
    field = f"{field}.parameters"
    return RequestedOutput(name, _count(field, parameters, "classification", "use the number of classes wanted"))


def check_no_shared_memory(field: str, name: str, parameters: Parameters) -> None:
    """Raise `InvalidArgument` for shared memory, which the service cannot read or write."""
    if SHARED_MEMORY in parameters:
        remedy = f"tensor {name[:100]!r}: shared memory is not served; send tensors in the messages"
        raise invalid_field(f"{field}.parameters.{SHARED_MEMORY}", parameters[SHARED_MEMORY], remedy)


def _count(field: str, parameters: Parameters, name: str, remedy: str) -> int:
    value = parameters.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid_field(f"{field}.{name}", value, remedy)
    return value


# --- Classification ---
# Answers as text: label names, and classifications in Triton's string format.


def check_classifiable(tensor_specs: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> None:
    """Raise `InvalidArgument` naming an output that cannot be classified.

    `tensor_specs` has the outputs `requested`. Their rows must be lists of numbers.
    """
    for index, (spec, asked) in enumerate(zip(tensor_specs, requested, strict=False)):
        if asked.top and (len(spec.shape) < 2 or spec.datatype == "BYTES"):
            remedy = f"output {spec.name!r} has no classes, it is {spec}; ask for one that has, or without this"
            raise invalid_field(f"outputs[{index}].parameters.classification", asked.top, remedy)


def named(labels: Array, class_names: Sequence[str]) -> Array:
    """Convert `labels` (B), from 0, to (B) bytes objects, UTF-8.

    Empty for a class without a name.
    """
    names = np.empty(len(class_names) + 1, object)
    names[:] = [*(name.encode() for name in class_names), b""]
    found: Array = names[np.minimum(labels, len(class_names))]
    return found


def classified(values: Array, top: int, class_names: Sequence[str] = ()) -> Array:
    """Convert `values` (B, …) to (B, min(top, numbers of a row)) bytes objects, "value:index".

    The greatest number comes first; of equal numbers the first, and NaN last. Numbers with a name are
    "value:index:name".
    """
    rows = values.reshape(len(values), -1)
    top = min(top, rows.shape[1])
    greatest = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :top]
    chosen = np.take_along_axis(rows, greatest, axis=1)
    shape = "%f:%d" if np.issubdtype(rows.dtype, np.floating) else "%s:%d"
    names = [f":{name}" for name in class_names[: rows.shape[1]]] + [""] * (rows.shape[1] - len(class_names))
    strings = np.empty(greatest.shape, object)
    for row, (numbers, indices) in enumerate(zip(chosen.tolist(), greatest.tolist(), strict=True)):
        pairs = zip(numbers, indices, strict=True)
        strings[row] = [(shape % pair + names[pair[1]]).encode() for pair in pairs]
    return strings
