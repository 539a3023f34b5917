"""`millrace predict`: images, or rows of a dataset version, through a served model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import address_options, connected, json_option
from millrace_client.cli.output import console, new_table, print_json
from millrace_client.connection import Millrace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from millrace_client.inference import Answer

ROWS_SHOWN = 20


@dataclass(frozen=True)
class Input:
    """One image with what it is called and, where it is known, what it shows."""

    source: str
    image: npt.NDArray[np.uint8]
    truth: int | None = None


@click.command(cls=PlainCommand)
@click.argument("model")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dataset", metavar="NAME", help="Rows of datasets/d/versions/v instead of files.")
@click.option("--split", default="test", show_default=True)
@click.option("--limit", default=100, show_default=True, help="At most so many rows; 0: all.")
@click.option("--in-flight", default=64, show_default=True, help="Requests on the way at once.")
@address_options
@json_option
def predict(
    model: str,
    files: tuple[Path, ...],
    dataset: str | None,
    split: str,
    limit: int,
    in_flight: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Ask MODEL what FILES (PNG, JPEG) show, or the rows of a dataset version."""
    if bool(files) == bool(dataset):
        raise click.UsageError("give either image files or --dataset datasets/d/versions/v")
    with connected(values) as millrace:
        name, shape = _image_input(millrace, model)
        inputs = list(_rows(millrace, dataset, name, split, limit) if dataset else _decoded(files, shape))
        started = time.perf_counter()
        requests = ({name: one.image[None]} for one in inputs)
        answers = list(millrace.inference.infer_many(model, requests, in_flight=in_flight))
        seconds = time.perf_counter() - started
    if as_json:
        print_json(_document(model, inputs, answers))
    else:
        _print(inputs, answers, seconds)


def _image_input(millrace: Millrace, model: str) -> tuple[str, tuple[int, ...]]:
    """The name and the shape (without the batch) of the one raw image input of a model."""
    metadata = millrace.inference.model_metadata(model)
    for tensor in metadata.inputs:
        if tensor.datatype == "UINT8" and len(tensor.shape) in (3, 4):
            return tensor.name, tuple(tensor.shape[1:])
    found = ", ".join(f"{one.name} {one.datatype} {list(one.shape)}" for one in metadata.inputs)
    raise CommandFailed(f"{model} takes no uint8 images but {found}", remedy="ask it through the SDK")


def _decoded(files: Iterable[Path], shape: tuple[int, ...]) -> Iterator[Input]:
    """Each file in the shape (H, W) or (H, W, 3) that the model wants; other sizes are resized to it."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    height, width, *channels = shape
    for file in files:
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB" if channels else "L")
        except (UnidentifiedImageError, OSError) as error:
            raise CommandFailed(f"{file} is no image that can be read: {error}", remedy="use a PNG or a JPEG") from None
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        yield Input(str(file), np.asarray(image, dtype=np.uint8))


def _rows(millrace: Millrace, version: str, column: str, split: str, limit: int) -> Iterator[Input]:
    from millrace_client.images import image_rows

    images, labels = image_rows(millrace.data.read_table(version, split=split, limit=limit), column)
    for index, image in enumerate(images):
        yield Input(f"{split} {index}", image, None if labels is None else int(labels[index]))


def _best(answer: Answer) -> tuple[int, float]:
    label = int(answer.outputs["label"][0])
    return label, float(answer.outputs["probabilities"][0][label])


def _document(model: str, inputs: Sequence[Input], answers: Sequence[Answer]) -> dict[str, Any]:
    predictions = []
    for one, answer in zip(inputs, answers, strict=True):
        label, probability = _best(answer)
        known = {} if one.truth is None else {"truth": one.truth}
        predictions.append({"source": one.source, "label": label, "probability": probability, **known})
    return {"model": model, "predictions": predictions, "lineage": answers[0].lineage if answers else None}


def _print(inputs: Sequence[Input], answers: Sequence[Answer], seconds: float) -> None:
    known = [one.truth for one in inputs if one.truth is not None]
    table = new_table(
        "image", "label", "probability", *(["truth"] if known else []), numbers=("label", "probability", "truth")
    )
    right = 0
    for index, (one, answer) in enumerate(zip(inputs, answers, strict=True)):
        label, probability = _best(answer)
        right += label == one.truth
        if index < ROWS_SHOWN:
            truth = [] if one.truth is None else [f"[{'green' if label == one.truth else 'red'}]{one.truth}[/]"]
            table.add_row(one.source, f"[bold]{label}[/]", f"{probability:.1%}", *truth)
    console().print(table)
    if len(inputs) > ROWS_SHOWN:
        console().print(f"… and {len(inputs) - ROWS_SHOWN:,} more (--json shows all)")
    if known:
        console().print(
            f"{right:,} of {len(inputs):,} right ({right / len(inputs):.2%}), {len(inputs) / seconds:,.0f} requests/s"
        )
    if answers:
        print_lineage(answers[0].lineage)
