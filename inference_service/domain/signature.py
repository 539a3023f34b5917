"""What a model takes and gives, and whether a request fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from inference_service.domain.datatypes import DATATYPES
from inference_service.domain.rows import PREPARED, RAW, Rows, bytes_of
from inference_service.domain.tensors import Array, WireTensor, check_shape, decode
from shared.errors import InvalidArgument, invalid_field

FREE = -1  # a dimension that the request chooses
MAX_SHOWN_NAME = 100
# `age.null` says where `age` is null.
NULLS = ".null"
LABEL, LABEL_NAME = "label", "label_name"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor; the first dimension of `shape` is always the rows, `FREE`. `nullable`: its rows may be null.
    `class_names` names the numbers of a row, where there are names; `column_type` is Arrow's name of the type of a
    column of dates or times, such as timestamp[us], whose numbers these are. The tensor is the same without both."""

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
        """What a row of it takes in a message; of the names of classes the most that one takes; 0 where it varies."""
        if self.name == LABEL_NAME and self.class_names:
            return 4 + max(len(name.encode()) for name in self.class_names)  # behind its length
        return DATATYPES[self.datatype].item_bytes * math.prod(max(size, 0) for size in self.shape[1:])

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """`raw` is one row form, as the rows were ingested: a tensor for each column that the model's input is made of;
    `prepared` the other, the model's input itself.

    Metadata lists the raw form alone: the prepared one is for clients that did the preprocessing themselves.

    No tensor of the protocol has nulls. So with a nullable tensor a request may send another, named like it and ending
    in `NULLS`, BOOL of shape [rows]: true where the row is null. Not sent: no row is. The replica knows what NaN means.
    """

    raw: tuple[TensorSpec, ...]
    prepared: TensorSpec
    outputs: tuple[TensorSpec, ...]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Signature:
        return Signature(
            tuple(_spec(given) for given in record["raw"]),
            _spec(record["prepared"]),
            tuple(_spec(output) for output in record["outputs"]),
        )

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors of raw rows."""
        return {spec.name: spec for spec in self.raw}

    @cached_property
    def null_flags(self) -> dict[str, TensorSpec]:
        """What says where a nullable tensor is null, by its own name; a column of that name goes before it."""
        taken = self.by_name
        flags = [TensorSpec(spec.name + NULLS, "BOOL", (FREE,)) for spec in self.raw if spec.nullable]
        return {spec.name: spec for spec in flags if spec.name not in taken}

    @cached_property
    def offered(self) -> tuple[TensorSpec, ...]:
        """The `outputs`, and behind them what is sent only where it is asked for: the names of labels, of a classifier
        whose classes have names."""
        names = next((one.class_names for one in self.outputs if one.class_names), ())
        if not names or all(one.name != LABEL for one in self.outputs):
            return self.outputs
        return (*self.outputs, TensorSpec(LABEL_NAME, "BYTES", (FREE,), class_names=names))

    @cached_property
    def most_inputs(self) -> int:
        """Of the tensors of a request: raw rows with all flags of their nulls, or the prepared input."""
        return max(len(self.raw) + len(self.null_flags), 1)

    @cached_property
    def answer_row_bytes(self) -> int:
        """What a row of all outputs takes in a message at the most, without those for which that varies."""
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
    """The request's input, decoded and fitted to the model; `InvalidArgument` names the tensor that does not fit.

    `admit` is asked with the number of rows and their form once their names and shapes are known to fit, and before
    they are decoded, which may take much longer; it raises where they are not wanted.
    """
    form, given = fitted(signature, tensors, max_rows)
    admit(count_rows(given), form)
    values = {name: decode(tensor) for name, tensor in given.items()}
    size_bytes = _size_bytes(given, values)
    flags = signature.null_flags if form == RAW else ()
    nulls = {name.removesuffix(NULLS): values.pop(name) for name in flags if name in values}
    nulls = {name: where for name, where in nulls.items() if where.any()}
    return Rows(form, values, nulls, size_bytes=size_bytes)


def count_rows(given: Mapping[str, WireTensor]) -> int:
    """Of a request's tensors by name, which are `fitted`."""
    return next(iter(given.values())).shape[0]


def fitted(signature: Signature, tensors: Sequence[WireTensor], max_rows: int) -> tuple[str, dict[str, WireTensor]]:
    """The form of a request's rows, and its tensors by name, once their names, types and shapes are known to fit;
    `InvalidArgument` names the one that does not. What they hold is not looked at."""
    wanted = signature.by_name
    flags = signature.null_flags
    given: dict[str, WireTensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise invalid_field(f"{tensor.field}.name", tensor.name[:MAX_SHOWN_NAME], "this tensor is given twice")
        if tensor.name not in wanted and tensor.name not in flags and tensor.name != signature.prepared.name:
            raise invalid_field(f"{tensor.field}.name", tensor.name[:MAX_SHOWN_NAME], _inputs(signature))
        given[tensor.name] = tensor
    if not given:
        raise invalid_field("inputs", [], f"tensor {signature.raw[0].name!r} is missing: {_inputs(signature)}")
    if _is_prepared(signature, given):
        _check_rows(given, max_rows)
        return PREPARED, given
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
    _check_rows(given, max_rows)
    return RAW, given


def _is_prepared(signature: Signature, given: Mapping[str, WireTensor]) -> bool:
    """A tensor that fits both forms is raw."""
    prepared = signature.prepared
    if list(given) != [prepared.name]:
        return False
    tensor = given[prepared.name]
    namesakes = [spec for spec in signature.raw if spec.name == tensor.name]
    fits = prepared.fits(tensor.datatype, tensor.shape)
    if not fits and not namesakes:
        raise _misfit(signature, prepared, tensor)
    return fits and not any(spec.fits(tensor.datatype, tensor.shape) for spec in namesakes)


def _check_rows(given: Mapping[str, WireTensor], max_rows: int) -> None:
    """All tensors have equally many."""
    first = next(iter(given.values()))
    for name, tensor in given.items():
        check_shape(tensor)
        if not 1 <= tensor.shape[0] <= max_rows:
            remedy = f"tensor {name!r}: send 1 to {max_rows} rows in one request"
            raise invalid_field(f"{tensor.field}.shape", list(tensor.shape), remedy)
        if tensor.shape[0] != first.shape[0]:
            remedy = f"tensor {name!r} must have as many rows as {first.name!r}, {first.shape[0]}"
            raise invalid_field(f"{tensor.field}.shape", list(tensor.shape), remedy)


def _size_bytes(given: Mapping[str, WireTensor], decoded: Mapping[str, Array]) -> int:
    """About what they take in memory, without a look at each element of those whose bytes tell it."""
    size = 0
    for name, tensor in given.items():
        values = decoded[name]
        size += bytes_of(values) if tensor.raw is None else max(len(tensor.raw), values.nbytes)
    return size


def _misfit(signature: Signature, spec: TensorSpec, tensor: WireTensor) -> InvalidArgument:
    """`spec` is what the tensor of that name should be."""
    accepted = [(spec, "raw rows" if spec in signature.raw else "")]
    if tensor.name == signature.prepared.name and spec != signature.prepared:
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
    """The outputs to send, in the order asked for; where none is named, all but those that are sent on request."""
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


def check_answer_fits(wanted: Sequence[TensorSpec], rows: int, most_bytes: int) -> None:
    """Raises `InvalidArgument` where these outputs of so many rows have more bytes than an answer may."""
    row_bytes = sum(spec.row_bytes for spec in wanted)
    if rows * row_bytes > most_bytes:
        fewer = f"send at most {most_bytes // row_bytes} rows, or " if row_bytes <= most_bytes else ""
        remedy = f"an answer may have {most_bytes}; {fewer}ask for fewer outputs"
        raise invalid_field("outputs", f"{rows * row_bytes} bytes for {rows} rows", remedy)
