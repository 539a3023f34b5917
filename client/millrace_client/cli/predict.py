"""`millrace predict`: images, rows of CSV and Parquet files, or of a dataset version, through a served model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inference import model_config_pb2
from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import address_options, connected, json_option
from millrace_client.cli.output import print_json
from millrace_client.cli.predictions import Predictions, outputs_wanted, with_rows_named
from millrace_client.errors import InvalidArgument, Unimplemented
from millrace_client.inference import Answer, InferenceClient

if TYPE_CHECKING:
    import numpy.typing as npt

    from inference import grpc_service_pb2 as pb
    from millrace_client.rows.asking import Request, Row

# Of a model whose server does not tell how many it computes together.
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
    from millrace_client.rows.asking import asking_of_files, asking_of_version, limited
    from millrace_client.rows.sizes import cut_by_bytes, most_rows
    from millrace_client.rows.times import column_types
    from millrace_client.rows.typed import BadInput

    if bool(files) == bool(dataset):
        raise click.UsageError("give either files or --dataset datasets/d/versions/v")
    with connected(values) as millrace:
        metadata = millrace.inference.model_metadata(model, version=version)
        predictions = Predictions(keep_all=as_json)
        try:
            config = _config(millrace.inference, model, version)
            types = column_types(config)
            together = most_rows(metadata.inputs, min(_batch(config), in_flight))
            if dataset:
                most = 100 if limit is None else limit
                asking = asking_of_version(millrace.data, dataset, split, most, metadata.inputs, types, together)
            else:
                asking = asking_of_files(files, metadata.inputs, types, together)
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
    """How many rows the model computes together, and takes in one request."""
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
    """Each request's rows with their answer. An error about a row names it as its file counts it."""
    asked: deque[Sequence[Row]] = deque()

    def inputs() -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        for one in requests:
            asked.append(one.rows)
            yield one.inputs

    wanted = outputs_wanted(metadata, inference.server_metadata().extensions)
    try:
        answers = inference.infer_many(metadata.name, inputs(), in_flight=in_flight, version=version, outputs=wanted)
        for answer in answers:
            yield asked.popleft(), answer
    except InvalidArgument as error:
        raise with_rows_named(error, asked[0] if asked else ()) from None
