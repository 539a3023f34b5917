"""HTML reports of a version, and of a training run, which is read through the API.

A page has no script, no other file and no network access; all data is escaped. Curves are SVG paths. The path of a long
series is reduced to the visible detail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from jinja2 import Environment, PackageLoader, StrictUndefined

from millrace.data.v1 import data_service_pb2
from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.cli.command import duration_text, size_text
from millrace_client.errors import FailedPrecondition
from millrace_client.report import HEIGHT as BARS_HEIGHT
from millrace_client.report import WIDTH as BARS_WIDTH
from millrace_client.report import box_bars, cause_text, number_text, profile_of
from millrace_client.train import TrainClient

# --- Page of a version ---


def page(preview: data_service_pb2.PreviewVersionResponse) -> str:
    box = (BARS_WIDTH, BARS_HEIGHT)
    return rendered(TEMPLATE, {"size": size_text, "bars": box_bars}, profile=profile_of(preview), box=box)


# --- Page of a training run ---


def training_page(run: Run) -> str:
    filters = {"size": size_text, "duration": duration_text, "number": number_text}
    return rendered(TRAINING_TEMPLATE, filters, run=run, job=run.job, box=(WIDTH, HEIGHT))


# --- Training run ---

# Shown first; other metrics follow by name.
FIRST = ("loss", "validation_loss", "accuracy", "validation_accuracy")


@dataclass(frozen=True)
class Attempt:
    """An attempt's start and end. Times are seconds since the run was created; None: unknown."""

    number: int
    begun_s: float | None
    ended_s: float | None
    workers: int
    first_step: int
    last_step: int
    checkpoint: str
    cause: str
    text: str


@dataclass(frozen=True)
class Run:
    job: resources_pb2.TrainingJob
    curves: Sequence[Curve]
    attempts: Sequence[Attempt]
    warnings: Sequence[str]
    coverage: Sequence[pb.Coverage]
    checkpoints: Sequence[resources_pb2.Checkpoint]
    spec_text: str
    points: int

    @property
    def state(self) -> str:
        name = resources_pb2.TrainingJob.State.Name(self.job.state)
        return name.removeprefix("STATE_").lower()

    @property
    def wall_s(self) -> float:
        return max([0.0, *(attempt.ended_s or 0.0 for attempt in self.attempts)])


def collect(train: TrainClient, name: str, epochs: Sequence[int]) -> Run:
    """Read a run. `epochs` are those whose coverage is shown."""
    job = train.get_training_job(name)
    events = train.list_events(name)
    points = list(train.list_metrics(name))
    return Run(
        job=job,
        curves=curves_of(points, events),
        attempts=attempts_of(job, events),
        warnings=[event.warning for event in events if event.WhichOneof("event") == "warning"],
        coverage=_coverage(train, name, epochs),
        checkpoints=list(train.list_checkpoints(name)),
        spec_text=json.dumps(MessageToDict(job.spec, preserving_proto_field_name=True), indent=2),
        points=len(points),
    )


def _coverage(train: TrainClient, name: str, epochs: Sequence[int]) -> list[pb.Coverage]:
    """Return the epochs' coverage; none if the service no longer knows the rows.

    The rest of the report is still useful then.
    """
    try:
        return [train.get_coverage(name, epoch) for epoch in epochs]
    except FailedPrecondition:
        return []


def curves_of(points: Sequence[pb.MetricPoint], events: Sequence[pb.TrainingEvent]) -> list[Curve]:
    """Return a curve per metric of the steps; from the events if there are no points."""
    values: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, value in point.values.items():
            values.setdefault(name, []).append((point.step, value))
    if not points:
        for event in events:
            if event.WhichOneof("event") == "progress":
                values.setdefault("loss", []).append((event.progress.step, event.progress.loss))
            elif event.WhichOneof("event") == "validated":
                values.setdefault("validation_loss", []).append((event.validated.step, event.validated.loss))
    order = sorted(values, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    found = (curve(name, sorted(values[name])) for name in order)
    return [one for one in found if one is not None]


def attempts_of(job: resources_pb2.TrainingJob, events: Sequence[pb.TrainingEvent]) -> list[Attempt]:
    created = job.create_time.ToNanoseconds() / 1e9
    by_number: dict[int, list[pb.TrainingEvent]] = {}
    for event in events:
        by_number.setdefault(event.attempt, []).append(event)
    found = []
    for number, mine in sorted(by_number.items()):
        times = [event.time.ToNanoseconds() / 1e9 - created for event in mine]
        started = next((one for one in mine if one.HasField("attempt_started")), None)
        ended = next((one for one in mine if one.HasField("attempt_ended")), None)
        begin = started.attempt_started if started else pb.AttemptStarted()
        steps = [one.progress.step for one in mine if one.HasField("progress")]
        found.append(
            Attempt(
                number=number,
                begun_s=started.time.ToNanoseconds() / 1e9 - created if started else None,
                ended_s=times[-1],
                workers=begin.num_workers,
                first_step=begin.step,
                last_step=max([begin.step, *steps]),
                checkpoint=begin.checkpoint.rpartition("/")[2],
                cause=cause_text(ended.attempt_ended.cause) if ended else "",
                text=ended.attempt_ended.text if ended else "",
            )
        )
    return found


TEMPLATE, TRAINING_TEMPLATE = "page.html.jinja", "training.html.jinja"


# --- Curves ---

WIDTH, HEIGHT = 600, 160
# The number of columns of points. Each shows its mean, lowest and highest value.
_COLUMNS = 300
# Above this number of points, the line shows the mean of a column, and the band its range.
_DENSE = 2 * _COLUMNS

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One figure: `line` and `dots` in a box of `WIDTH` by `HEIGHT`, the origin at the upper left.

    `band` is the area between the lowest and highest values if there are too many for a line; else empty.
    """

    name: str
    line: str
    band: str
    dots: Sequence[tuple[float, float]]
    least: str
    most: str
    last: str
    first_step: str
    last_step: str
    omitted: int


def curve(name: str, points: Points) -> Curve | None:
    """Draw (step, value) points in the order of steps; None without points.

    Values that are not finite are left out and counted.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    first, last = finite[0][0], finite[-1][0]
    width, height = (last - first) or 1.0, (high - low) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        # A constant curve lies in the middle.
        share = (value - low) / height if high > low else 0.5
        return round((step - first) / width * WIDTH, 1), round(HEIGHT - 4 - share * (HEIGHT - 8), 1)

    columns = _columns(finite, first, width)
    dense = len(finite) > _DENSE
    upper = [place(step, most) for step, _, _, most in columns]
    lower = [place(step, least) for step, _, least, _ in reversed(columns)]
    return Curve(
        name=name,
        line=_path([place(step, mean) for step, mean, _, _ in columns]),
        band=_path([*upper, *lower]) + "Z" if dense else "",
        dots=[place(*one) for one in finite] if len(finite) <= 40 else [],
        least=number_text(low),
        most=number_text(high),
        last=number_text(finite[-1][1]),
        first_step=number_text(first),
        last_step=number_text(last),
        omitted=len(points) - len(finite),
    )


def _columns(points: Points, first: float, width: float) -> list[tuple[float, float, float, float]]:
    """Return (step, mean, least, most) of each column that has points. Few points are a column each."""
    if len(points) <= _DENSE:
        return [(step, value, value, value) for step, value in points]
    held: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        held.setdefault(min(_COLUMNS - 1, int((step - first) / width * _COLUMNS)), []).append((step, value))
    found = []
    for column in sorted(held):
        steps, values = zip(*held[column], strict=True)
        found.append((sum(steps) / len(steps), math.fsum(values) / len(values), min(values), max(values)))
    return found


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in places)


# --- Rendering ---


def rendered(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("millrace_client.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)
