"""What a model answered about rows, as a table for people and as documents for programs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inference import grpc_service_pb2 as pb
from millrace.common.v1.lineage_pb2 import Lineage
from millrace_client.cli.output import console, cut, new_table, verbatim
from millrace_client.errors import FieldViolation, InvalidArgument
from millrace_client.inference import Answer, Arrays

if TYPE_CHECKING:
    from rich.text import Text

    from millrace_client.rows.asking import Row

ROWS_SHOWN = 20
MAX_CELL, MAX_NUMBERS = 32, 4
LABEL, LABEL_NAME, PROBABILITIES, LOGITS = "label", "label_name", "probabilities", "logits"
CLASSIFIER = {LABEL, PROBABILITIES, LOGITS}
# In a message about rows: where one is named, as the request counts it.
_ROW = re.compile(r"(^|; )row (\d+)(?=: )")


def outputs_wanted(metadata: pb.ModelMetadataResponse, extensions: Collection[str]) -> Mapping[str, int]:
    """What to ask of a model: of a classifier its label and probabilities, and the label's name; of a server that does
    not offer names the greatest of the logits, with which it comes. Of other models every output as it is."""
    names = {tensor.name for tensor in metadata.outputs}
    if names >= CLASSIFIER and LABEL_NAME in names:
        return dict.fromkeys((LABEL, LABEL_NAME, PROBABILITIES), 0)
    if names >= CLASSIFIER and "classification" in extensions:
        return {**dict.fromkeys((tensor.name for tensor in metadata.outputs), 0), LOGITS: 1}
    return {}


def with_rows_named(error: InvalidArgument, rows: Sequence[Row]) -> InvalidArgument:
    """The error with the request's rows as their files count them."""

    def name(found: re.Match[str]) -> str:
        place = int(found[2])
        return f"{found[1]}{rows[place]}" if place < len(rows) else found[0]

    def named(text: str) -> str:
        return _ROW.sub(name, text)

    return InvalidArgument(
        named(error.message),
        reason=error.reason,
        metadata={**error.metadata, **_place(error, rows)},
        field_violations=tuple(FieldViolation(one.field, named(one.description)) for one in error.field_violations),
        remedy=error.remedy,
        retry_after_s=error.retry_after_s,
        request_id=error.request_id,
    )


def _place(error: InvalidArgument, rows: Sequence[Row]) -> Mapping[str, str]:
    """Of the first row at fault, where the error names one."""
    index = error.metadata.get("row", "")
    if not index.isdecimal() or int(index) >= len(rows):
        return {}
    row = rows[int(index)]
    return {"source": row.source, "row": "" if row.number is None else str(row.number)}


class Predictions:
    """Takes answers as they come; of many rows it keeps those that are shown, or all."""

    def __init__(self, *, keep_all: bool) -> None:
        self._keep_all = keep_all
        self._kept: list[tuple[Row, dict[str, Any]]] = []
        self._rows = self._known = self._right = 0
        self.lineage: Lineage | None = None

    def add(self, rows: Sequence[Row], answer: Answer) -> None:
        if self.lineage is None:
            self.lineage = answer.lineage
        for index, row in enumerate(rows):
            found = _prediction(answer.outputs, index)
            self._rows += 1
            if row.truth is not None and LABEL in found:
                self._known += 1
                self._right += found[LABEL] == row.truth
            if self._keep_all or len(self._kept) < ROWS_SHOWN:
                self._kept.append((row, found))

    def documents(self) -> list[dict[str, Any]]:
        """JSON-able, one of each row that was kept."""
        return [
            {
                "source": row.source,
                **({} if row.number is None else {"row": row.number}),
                **{name: _json_able(value) for name, value in found.items()},
                **({} if row.truth is None else {"truth": row.truth}),
            }
            for row, found in self._kept
        ]

    def print(self, seconds: float) -> None:
        """The first rows as a table; how many were right, where that is known."""
        shown = self._kept[:ROWS_SHOWN]
        about = list(dict.fromkeys(name for row, _ in shown for name in row.shown))
        outputs = list(dict.fromkeys(name for _, found in shown for name in found))
        truth = ["truth"] if self._known else []
        first = "row" if any(row.number is not None or row.shown for row, _ in shown) else "image"
        table = new_table(*(_header(name) for name in (first, *about, *outputs, *truth)))
        for column in table.columns[1 + len(about) :]:
            column.justify = "right"
        for row, found in shown:
            source = row.source if row.number is None else f"{row.source} {row.number}"
            cells = [verbatim(source), *(verbatim(cut(row.shown.get(name, ""), MAX_CELL), "dim") for name in about)]
            table.add_row(*cells, *(_cell(name, found) for name in outputs), *([_truth(row, found)] if truth else []))
        console().print(table)
        if self._rows > len(shown):
            console().print(f"… and {self._rows - len(shown):,} more (--json shows all)")
        if self._known:
            right = f"{self._right:,} of {self._known:,} right ({self._right / self._known:.2%})"
            console().print(f"{right}, {self._rows / seconds:,.0f} rows/s")


def _prediction(outputs: Arrays, row: int) -> dict[str, Any]:
    """Of a classifier its label, the class's name where it has one, and its probability; else every output."""
    if LABEL not in outputs or outputs[LABEL].dtype.kind not in "iu":
        return {name: _plain(values[row]) for name, values in outputs.items()}
    label = int(outputs[LABEL].reshape(len(outputs[LABEL]), -1)[row, 0])
    found: dict[str, Any] = {LABEL: label}
    name = _class_name(outputs, row, label)
    if name:
        found["class"] = name
    if PROBABILITIES in outputs:
        found["probability"] = float(outputs[PROBABILITIES][row][label])
    return found


def _class_name(outputs: Arrays, row: int, label: int) -> str:
    """As an output of its own, or out of `b"value:index:name"`; empty where there is none."""
    if LABEL_NAME in outputs:
        return str(outputs[LABEL_NAME][row].decode(errors="replace"))
    if LOGITS not in outputs or outputs[LOGITS].dtype.kind != "O":
        return ""
    _, index, *name = outputs[LOGITS][row][0].decode().split(":", 2)
    # Of logits that are no numbers, the greatest is none in particular.
    return name[0] if name and int(index) == label else ""


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return _plain_list(value.tolist()) if hasattr(value, "tolist") else value


def _plain_list(value: Any) -> Any:
    return [_plain_list(one) for one in value] if isinstance(value, list) else _plain(value)


def _json_able(value: Any) -> Any:
    """JSON has no number that is not finite; protobuf's JSON mapping has these names for them."""
    if isinstance(value, list):
        return [_json_able(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _header(name: str) -> str:
    from rich.markup import escape

    return escape(cut(verbatim(name).plain, MAX_CELL))


def _cell(name: str, found: Mapping[str, Any]) -> Text:
    value = found.get(name)
    if name == "probability" and LABEL in found:
        return verbatim(f"{value:.1%}")
    return verbatim(_shown(value), "bold" if name in (LABEL, "class") else "")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        more = ["…"] if len(value) > MAX_NUMBERS else []
        return cut(", ".join([*(_shown(one) for one in value[:MAX_NUMBERS]), *more]), MAX_CELL)
    return f"{value:.6g}" if isinstance(value, float) else cut(str(value), MAX_CELL)


def _truth(row: Row, found: Mapping[str, Any]) -> Text:
    return verbatim("" if row.truth is None else str(row.truth), "green" if found.get(LABEL) == row.truth else "red")
