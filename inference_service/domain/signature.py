"""What a model takes and gives, and whether a request fits it: rows, tensors by their names, the parameters of a
request, and answers in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from inference_service.domain.tensors import DATATYPES, Array, WireTensor, check_shape, decode
from shared.errors import InvalidArgument, MillraceError, invalid_field

# --- Rows ---
# Rows on their way to a model, gathered from several requests into batches, and what comes back for them.

RAW, PREPARED = "raw", "prepared"
# So many of a request's bad rows are told one by one.
MAX_SHOWN_ROWS = 10


@dataclass(frozen=True, eq=False)
class Rows:
    """`values` has each input tensor's rows along its first axis; `form` is `RAW` or `PREPARED`.

    `nulls` says of some tensors where they are null: bool (rows,). What `values` holds there means nothing. `trace` are
    the W3C's headers of the span that rows on their way to a replica are computed for, if that is recorded.
    `size_bytes` is about what the values of a request's rows take in memory.
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
        """The rows `start` to `stop`, without a copy."""
        values = {name: whole[start:stop] for name, whole in self.values.items()}
        nulls = {name: flags[start:stop] for name, flags in self.nulls.items()}
        return Rows(self.form, values, nulls, size_bytes=sum(map(bytes_of, values.values())))

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, which are of one form and one model, one part after the other."""
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
    """What an array takes in memory; of one of bytes objects, what these do."""
    return sum(map(len, values.flat)) if values.dtype.kind == "O" else values.nbytes


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model gives for some rows: one array an output, rows along the first axis.

    `refused` says of single rows what is wrong with them, by their place, and `failed` with what error others failed
    through no fault of theirs; what the arrays hold there means nothing.
    `input_s` and `infer_s` are how long the preprocessing and the model took for all of the batch; `sent_again` where a
    first replica had died with it, so that the way there tells nothing of others'. `non_finite` are the places of rows
    that are answered with a NaN or an infinity.
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
        """The arrays. Raises `InvalidArgument` naming the rows that were refused, counted from `first_row`, or else the
        error of the first row that failed."""
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
# What a model takes and gives, and whether a request fits it.

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
    def max_inputs(self) -> int:
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
    """How many rows `rows_of` would make of the tensors, and of which form; it raises the same, but for what is wrong
    with their contents."""
    _, rows, form = _fitted(signature, tensors, max_rows)
    return rows, form


def _fitted(
    signature: Signature, tensors: Sequence[WireTensor], max_rows: int
) -> tuple[dict[str, WireTensor], int, str]:
    """The tensors by name, how many rows they have, and of which form."""
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


def _rows_in(given: Mapping[str, WireTensor], max_rows: int) -> int:
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
    return first.shape[0]


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


def check_answer_fits(wanted: Sequence[TensorSpec], rows: int, max_bytes: int) -> None:
    """Raises `InvalidArgument` where these outputs of so many rows have more bytes than an answer may."""
    row_bytes = sum(spec.row_bytes for spec in wanted)
    if rows * row_bytes > max_bytes:
        fewer = f"send at most {max_bytes // row_bytes} rows, or " if row_bytes <= max_bytes else ""
        remedy = f"an answer may have {max_bytes}; {fewer}ask for fewer outputs"
        raise invalid_field("outputs", f"{rows * row_bytes} bytes for {rows} rows", remedy)


# --- Request parameters ---
# The parameters of a request, of its tensors and of the outputs that it asks for, as far as they mean something here.
#
# What means nothing here is ignored, as Triton does, but for shared memory: its tensors would be missing.

Parameters = Mapping[str, object]

# 1 is the most urgent. Above the last level is the default's, as in Triton.
PRIORITY_LEVELS = 10
DEFAULT_PRIORITY = 5
SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True)
class RequestOptions:
    """`timeout_s`: in which it must be answered; None: no such wish."""

    priority: int = DEFAULT_PRIORITY
    timeout_s: float | None = None


@dataclass(frozen=True)
class RequestedOutput:
    """`top`: so many of the greatest numbers of each row, as a classification; 0: the output itself."""

    name: str
    top: int = 0


def request_options_of(parameters: Parameters) -> RequestOptions:
    """Raises `InvalidArgument` naming the parameter."""
    priority = _count("parameters", parameters, "priority", "use 1, the most urgent, to 10; 0 is the default")
    timeout_us = _count("parameters", parameters, "timeout", "use microseconds; 0 is no timeout")
    return RequestOptions(
        priority if 1 <= priority <= PRIORITY_LEVELS else DEFAULT_PRIORITY,
        timeout_us / 1e6 if timeout_us else None,
    )


def requested_output(field: str, name: str, parameters: Parameters) -> RequestedOutput:
    """`field` is the output's path in the request. Raises `InvalidArgument`."""
    check_no_shared_memory(field, name, parameters)
    field = f"{field}.parameters"
    return RequestedOutput(name, _count(field, parameters, "classification", "use the number of classes wanted"))


def check_no_shared_memory(field: str, name: str, parameters: Parameters) -> None:
    """Raises `InvalidArgument`: nothing would be found there, or written there."""
    if SHARED_MEMORY in parameters:
        remedy = f"tensor {name[:100]!r}: shared memory is not served; send tensors in the messages"
        raise invalid_field(f"{field}.parameters.{SHARED_MEMORY}", parameters[SHARED_MEMORY], remedy)


def _count(field: str, parameters: Parameters, name: str, remedy: str) -> int:
    value = parameters.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid_field(f"{field}.{name}", value, remedy)
    return value


# --- Classification ---
# Answers in words: the names of labels, and classifications, whose strings Triton's clients know to read.


def check_classifiable(wanted: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> None:
    """Raises `InvalidArgument` naming an output whose rows are no lists of numbers; `wanted` are those `requested`."""
    for index, (spec, asked) in enumerate(zip(wanted, requested, strict=False)):
        if asked.top and (len(spec.shape) < 2 or spec.datatype == "BYTES"):
            remedy = f"output {spec.name!r} has no classes, it is {spec}; ask for one that has, or without this"
            raise invalid_field(f"outputs[{index}].parameters.classification", asked.top, remedy)


def named(labels: Array, class_names: Sequence[str]) -> Array:
    """`labels` (B), from 0, to (B) bytes objects, UTF-8; empty for a class that has no name."""
    names = np.empty(len(class_names) + 1, object)
    names[:] = [*(name.encode() for name in class_names), b""]
    found: Array = names[np.minimum(labels, len(class_names))]
    return found


def classified(values: Array, top: int, class_names: Sequence[str] = ()) -> Array:
    """`values` (B, …) to (B, min(top, numbers of a row)) bytes objects, "value:index", the greatest number first; of
    equal numbers the first one first, NaN last. "value:index:name" for the numbers that have a name."""
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
