"""`millrace predict|bench`: sends images, rows of CSV and Parquet files, or a dataset version to a served model.

`predict` prints a table for people or JSON for programs. `bench` measures the model's speed, and its behaviour under
overload.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inference import grpc_service_pb2 as pb
from inference import model_config_pb2
from millrace.common.v1.lineage_pb2 import Lineage
from millrace_client.cli.command import (
    FAILED,
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    cut,
    json_option,
    new_table,
    print_json,
    verbatim,
)
from millrace_client.cli.deployments import print_lineage
from millrace_client.errors import FieldViolation, InvalidArgument, Unimplemented
from millrace_client.inference import Answer, Arrays, InferenceClient

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.text import Text

    from millrace_client.load import Measured
    from millrace_client.request_builder import Request, Row


# --- Predict ---

# The batch size for a model whose server does not report its own.
DEFAULT_BATCH = 16
QUEUED_ROWS = "max_queued_rows"


@click.command(cls=PlainCommand)
@click.argument("model")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dataset", metavar="NAME", help="Rows of datasets/d/versions/v instead of files.")
@click.option("--split", default="test", show_default=True)
@click.option(
    "--limit", type=click.IntRange(0), help="At most so many rows; 0: all.  [default: 100 of a dataset, all of files]"
)
@click.option("--in-flight", type=click.IntRange(1), default=64, show_default=True, help="Rows on the way at once.")
@click.option("--version", default="", help="One version of the model, not as its deployment routes.")
@address_options
@json_option
def predict(
    model: str,
    files: tuple[Path, ...],
    dataset: str | None,
    split: str,
    limit: int | None,
    in_flight: int,
    version: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Ask MODEL about FILES, or about the rows of a dataset version, and show what it answers.

    FILES are images, or CSV and Parquet files with a column for each of the model's inputs, by its name; further ones
    are left out. They are read as `millrace data import` reads them: an empty field, NA, N/A, null and NaN of a CSV are
    null. Dates and times are as ISO 8601 writes them, and go in the unit of the column that the model was trained on;
    a CSV's numbers are none.
    Files that have some of the columns each are put side by side. Rows of files are counted from 1.
    """
    from millrace_client.request_builder import (
        cut_by_bytes,
        limited,
        max_rows,
        requests_of_files,
        requests_of_version,
    )
    from millrace_client.rows import BadInput, column_types

    if bool(files) == bool(dataset):
        raise click.UsageError("give either files or --dataset datasets/d/versions/v")
    with connected(values) as millrace:
        metadata = millrace.inference.model_metadata(model, version=version)
        predictions = Predictions(keep_all=as_json)
        try:
            config = _config(millrace.inference, model, version)
            types = column_types(config)
            together = max_rows(metadata.inputs, min(_batch(config), in_flight))
            if dataset:
                most = 100 if limit is None else limit
                asking = requests_of_version(millrace.data, dataset, split, most, metadata.inputs, types, together)
            else:
                asking = requests_of_files(files, metadata.inputs, types, together)
            requests = cut_by_bytes(limited(asking.requests, limit or 0))
            started_s = time.perf_counter()
            at_once = max(in_flight // asking.rows, 1)
            for rows, answer in _answers(millrace.inference, metadata, version, requests, at_once):
                predictions.add(rows, answer)
            seconds = time.perf_counter() - started_s
        except BadInput as error:
            raise CommandFailed(str(error), remedy=error.remedy) from None
    if as_json:
        print_json({"model": model, "predictions": predictions.documents(), "lineage": predictions.lineage})
        return
    predictions.print(seconds)
    if predictions.lineage is not None:
        print_lineage(predictions.lineage)


def _config(inference: InferenceClient, model: str, version: str) -> model_config_pb2.ModelConfig:
    try:
        return inference.model_config(model, version=version)
    except Unimplemented:
        return model_config_pb2.ModelConfig(max_batch_size=DEFAULT_BATCH)


def _batch(config: model_config_pb2.ModelConfig) -> int:
    """Return the most rows that the model computes together and accepts in one request."""
    batch = config.max_batch_size or 1
    if QUEUED_ROWS in config.parameters:
        batch = min(batch, int(config.parameters[QUEUED_ROWS].string_value))
    return batch


def _answers(
    inference: InferenceClient,
    metadata: pb.ModelMetadataResponse,
    version: str,
    requests: Iterable[Request],
    in_flight: int,
) -> Iterator[tuple[Sequence[Row], Answer]]:
    """Yield each request's rows with their answer. An error about a row names it by its file and number."""
    asked: deque[Sequence[Row]] = deque()

    def inputs() -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        for request in requests:
            asked.append(request.rows)
            yield request.inputs

    wanted = outputs_wanted(metadata, inference.server_metadata().extensions)
    try:
        answers = inference.infer_many(metadata.name, inputs(), in_flight=in_flight, version=version, outputs=wanted)
        for answer in answers:
            yield asked.popleft(), answer
    except InvalidArgument as error:
        raise with_rows_named(error, asked[0] if asked else ()) from None


# --- Answers ---

ROWS_SHOWN = 20
MAX_CELL, MAX_NUMBERS = 32, 4
LABEL, LABEL_NAME, PROBABILITIES, LOGITS = "label", "label_name", "probabilities", "logits"
CLASSIFIER = {LABEL, PROBABILITIES, LOGITS}
# Finds the row that a message names by its index in the request.
_ROW = re.compile(r"(^|; )row (\d+)(?=: )")


def outputs_wanted(metadata: pb.ModelMetadataResponse, extensions: Collection[str]) -> Mapping[str, int]:
    """Return the outputs to request from a model.

    From a classifier they are its label, the label's name and its probabilities. If the server does not offer label
    names, the classification extension adds the name to the greatest logit. Other models return every output.
    """
    names = {tensor.name for tensor in metadata.outputs}
    if names >= CLASSIFIER and LABEL_NAME in names:
        return dict.fromkeys((LABEL, LABEL_NAME, PROBABILITIES), 0)
    if names >= CLASSIFIER and "classification" in extensions:
        return {**dict.fromkeys((tensor.name for tensor in metadata.outputs), 0), LOGITS: 1}
    return {}


def with_rows_named(error: InvalidArgument, rows: Sequence[Row]) -> InvalidArgument:
    """Return the error with rows named by their files and numbers."""

    def name(found: re.Match[str]) -> str:
        place = int(found[2])
        return f"{found[1]}{rows[place]}" if place < len(rows) else found[0]

    def named(text: str) -> str:
        return _ROW.sub(name, text)

    return InvalidArgument(
        named(error.message),
        reason=error.reason,
        metadata={**error.metadata, **_place(error, rows)},
        field_violations=tuple(
            FieldViolation(violation.field, named(violation.description)) for violation in error.field_violations
        ),
        remedy=error.remedy,
        retry_after_s=error.retry_after_s,
        request_id=error.request_id,
    )


def _place(error: InvalidArgument, rows: Sequence[Row]) -> Mapping[str, str]:
    """Return the file and number of the first faulty row, if the error names one."""
    index = error.metadata.get("row", "")
    if not index.isdecimal() or int(index) >= len(rows):
        return {}
    row = rows[int(index)]
    return {"source": row.source, "row": "" if row.number is None else str(row.number)}


class Predictions:
    """Collects answers. It keeps those to be shown, or all."""

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
        """Return one JSON document per kept row."""
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
        """Print the first rows as a table and, if truths are known, how many answers were right."""
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
    """Return one row's prediction: a classifier's label, class name and probability, else every output."""
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
    """Return the class's name from its own output or from `b"value:index:name"`; empty if there is none."""
    if LABEL_NAME in outputs:
        return str(outputs[LABEL_NAME][row].decode(errors="replace"))
    if LOGITS not in outputs or outputs[LOGITS].dtype.kind != "O":
        return ""
    _, index, *name = outputs[LOGITS][row][0].decode().split(":", 2)
    # If the logits are NaN, the greatest is arbitrary.
    return name[0] if name and int(index) == label else ""


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return _plain_list(value.tolist()) if hasattr(value, "tolist") else value


def _plain_list(value: Any) -> Any:
    return [_plain_list(one) for one in value] if isinstance(value, list) else _plain(value)


def _json_able(value: Any) -> Any:
    """Replace non-finite numbers by their names in protobuf's JSON mapping, because JSON has none."""
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


# --- Bench ---

# The number of generated rows, which are sent again and again.
MADE_UP_ROWS = 256
LATE_TEXT = "late (ended by this client's own timer)"
FIGURES = ("calls", "share", "p50", "p90", "p95", "p99", "p99.9", "max")


@click.command(cls=PlainCommand)
@click.argument("model")
@click.option(
    "--in-flight", type=click.IntRange(1), help="Closed loop: so many requests on the way at once. Default: 64."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Open loop: so many requests a second, whatever comes back, at random times.",
)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option("--warm-up", type=click.FloatRange(0), default=1.0, show_default=True, help="Seconds not counted.")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="In seconds.")
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="Rows in a request.")
@click.option(
    "--rows-from",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Rows of a .npy, .npz or .parquet, instead of made-up ones.",
)
@click.option("--version", default="", help="One version of the model, not as its deployment routes.")
@click.option("--seed", default=0, show_default=True, help="Of made-up rows, and of the times of --rate.")
@address_options
@json_option
def bench(
    model: str,
    in_flight: int | None,
    rate: float | None,
    seconds: float,
    warm_up: float,
    deadline: float,
    rows: int,
    rows_from: Path | None,
    version: str,
    seed: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Load MODEL, and print its throughput, latencies and what its answers were."""
    from millrace_client.load import Plan, closed_loop, made_up_rows, open_loop, requests_of, rows_of_file
    from millrace_client.rows import BadInput

    if in_flight is not None and rate is not None:
        raise click.UsageError("give either --in-flight (closed loop) or --rate (open loop)")
    with connected(values) as millrace:
        metadata = millrace.inference.model_metadata(model, version=version)
        address, headers = millrace.addresses.inference, millrace.authorization
    try:
        if rows_from is None:
            given = made_up_rows(metadata, max(MADE_UP_ROWS, rows), seed)
        else:
            given = rows_of_file(metadata, rows_from)
        requests = requests_of(model, given, rows, version=version)
    except BadInput as error:
        raise CommandFailed(str(error), remedy=error.remedy or "--rows-from names a file of rows") from None
    plan = Plan(
        address=address,
        requests=requests,
        rows_per_request=rows,
        seconds=seconds,
        warm_up_s=warm_up,
        deadline_s=deadline,
        metadata=headers,
    )
    loop = {"rate": rate} if rate is not None else {"in_flight": in_flight or 64}
    try:
        measured = open_loop(plan, rate, seed) if rate is not None else closed_loop(plan, in_flight or 64)
    except TimeoutError as error:
        raise CommandFailed(str(error), remedy="`millrace status` shows what is up") from None
    if as_json:
        print_json({"model": model, **loop, "rows": rows, "deadline_s": deadline, **measured.as_dict()})
    else:
        _print(measured, rate)
    if not measured.with_status("OK"):
        click.echo("error: no request was answered\n  remedy: `millrace predict` shows why", err=True)
        raise click.exceptions.Exit(FAILED)


def _print(measured: Measured, rate: float | None) -> None:
    table = new_table("status", *FIGURES, numbers=FIGURES)
    for status, count in measured.statuses.items():
        latency_ms = measured.latency_ms(status)
        name = LATE_TEXT if status == "LATE" else f"[{'green' if status == 'OK' else 'red'}]{status}[/]"
        figures = (f"{one:.1f} ms" for one in latency_ms.values())
        table.add_row(name, f"{count:,}", f"{measured.share(status):.2%}", *figures)
    console().print(table)
    rows = measured.rows_per_request
    each = f", {measured.answered_per_s * rows:,.0f} rows/s" if rows > 1 else ""
    console().print(f"[bold]{measured.answered_per_s:,.1f}[/] answers/s{each}, over {measured.seconds:g} s")
    if rate is not None:
        behind = measured.behind_ms()
        console().print(f"this client sent {behind['p50']:.1f} ms (p50), {behind['p99']:.1f} ms (p99) later than due")
