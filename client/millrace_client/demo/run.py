"""The demo's stages, in order. Each stage only calls a service.

A `Story` prints the stages with figures and wall times. The recipe defines the data, the model and the epochs. At the
end the test split is sent to the served model, which shows its answers, accuracy and speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.common.v1.lineage_pb2 import Lineage
from millrace.data.v1 import data_service_pb2
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.train.v1 import resources_pb2
from millrace.train.v1.resources_pb2 import TrainingSpec
from millrace_client.cli.command import CommandFailed, console, duration_text, new_table
from millrace_client.cli.data_import import wait_with_rows
from millrace_client.cli.deployments import print_lineage
from millrace_client.cli.progress import Curves, TrainingView
from millrace_client.connection import Millrace
from millrace_client.data import image_rows
from millrace_client.demo.digits import FILES
from millrace_client.errors import NotFound
from millrace_client.specs import hold_out, idx_source, optimizer, training_spec
from millrace_client.steps import normalize, to_float

# --- Stages ---

DATASET = "digits"


def run(
    millrace: Millrace, story: Story, *, folder_uri: str, suffixes: tuple[str, ...], epochs: int, output: Path
) -> dict[str, Any]:
    """Import, train, deploy, predict, draw. Returns the figures as JSON values."""
    with story.stage("Import the digits"):
        version = import_digits(millrace, folder_uri, suffixes)
        splits = " · ".join(f"{split.name} {split.row_count:,}" for split in version.splits)
        story.say(f"[cyan]{version.name}[/]: {splits} images")
    run_id = free_id(millrace)
    with story.stage("Train ResNet-18 on two workers"):
        job, curves = train(millrace, spec(version, epochs), run_id)
        best = job.best_checkpoint.rpartition("/")[2]
        story.say(f"[cyan]{job.name}[/] succeeded after {job.progress.step} steps; best checkpoint: {best}")
    with story.stage("Deploy the best checkpoint"):
        with console().status("loading the model …"):
            deployment = millrace.deployments.create_deployment(run_id, job.best_checkpoint).wait()
        story.say(f"[cyan]{deployment.name}[/] answers as model [bold]{run_id}[/]")
    with story.stage("Ask it about the test split"):
        served = ask(millrace, run_id, version.name)
        story.say(
            f"{len(served.labels):,} requests with raw uint8 images, {IN_FLIGHT} in flight: "
            f"[bold]{served.requests_per_second:,.0f} requests/s[/], "
            f"p50 {served.latency_ms(50):.0f} ms, p99 {served.latency_ms(99):.0f} ms"
        )
        story.say(f"test accuracy [bold green]{served.accuracy:.2%}[/]")
    with story.stage("Draw the pictures"):
        pictures = draw(served, curves, output)
        story.say("  ".join(str(path) for path in pictures))
    console().print("\n[bold]Lineage[/], as each answer carries it")
    print_lineage(served.lineage)
    return {
        "dataset_version": version.name,
        "training_job": job.name,
        "model": run_id,
        "test_accuracy": served.accuracy,
        "requests_per_second": served.requests_per_second,
        "latency_p50_ms": served.latency_ms(50),
        "latency_p99_ms": served.latency_ms(99),
        "lineage": served.lineage,
        "pictures": [str(path) for path in pictures],
    }


def import_digits(millrace: Millrace, folder_uri: str, suffixes: tuple[str, ...]) -> DatasetVersion:
    """Import with the first suffix whose files the server finds."""
    millrace.data.create_dataset(DATASET, display_name="Handwritten digits", exist_ok=True)
    for suffix in suffixes:
        operation = millrace.data.import_version(
            f"datasets/{DATASET}", sources(folder_uri, suffix), hold_outs=hold_outs()
        )
        try:
            return wait_with_rows(operation)
        except NotFound:
            if suffix == suffixes[-1]:
                raise
    raise ValueError("name at least one suffix")


def free_id(millrace: Millrace) -> str:
    """Return `digits`, or `digits-2` and so on if earlier demos left jobs or deployments."""
    taken = {job.name.rpartition("/")[2] for job in millrace.train.list_training_jobs()}
    taken |= {deployment.name.rpartition("/")[2] for deployment in millrace.deployments.list_deployments()}
    number, candidate = 1, DATASET
    while candidate in taken:
        number += 1
        candidate = f"{DATASET}-{number}"
    return candidate


def train(
    millrace: Millrace, spec: resources_pb2.TrainingSpec, job_id: str
) -> tuple[resources_pb2.TrainingJob, Curves]:
    """Train with a live view. Raises `CommandFailed` unless it succeeds; an interrupt cancels the job."""
    job = millrace.train.create_training_job(job_id, spec)
    curves = Curves()
    try:
        with TrainingView(spec) as view:
            view.show(millrace.train.watch_training_job(job.name), curves)
    except KeyboardInterrupt:
        millrace.train.cancel_training_job(job.name)
        raise
    job = millrace.train.get_training_job(job.name)
    if job.state != resources_pb2.TrainingJob.STATE_SUCCEEDED:
        state = resources_pb2.TrainingJob.State.Name(job.state).removeprefix("STATE_").lower()
        raise CommandFailed(f"{job.name} {state}: {job.error.message}")
    return job, curves


def ask(millrace: Millrace, model: str, version: str) -> Served:
    with console().status("asking …") as line:
        return classify_split(
            millrace, model, version, on_answer=lambda done, total: line.update(f"{done:,} of {total:,} answers")
        )


def draw(served: Served, curves: Curves, output: Path) -> list[Path]:
    from millrace_client.demo.pictures import contact_sheet, learning_curves

    output.mkdir(parents=True, exist_ok=True)
    sheet, lines = output / "contact-sheet.png", output / "learning-curves.png"
    with console().status("drawing …"):
        contact_sheet(served, sheet)
        learning_curves(curves, served, lines)
    return [sheet, lines]


def print_how_to_talk(model: str, version: str) -> None:
    """Print commands to try while the stack is up."""
    console().print("\n[bold]The stack is still up.[/] Try")
    for command, what in (
        ("millrace status", "what runs, and where"),
        (f"millrace predict {model} --dataset {version} --split test", "ask the model about test images"),
        (f"millrace predict {model} digit.png", "or about a picture of your own: white on black"),
        (f"millrace data show {version}", "schema, splits, first rows"),
        ("millrace train list", "the runs"),
        ("millrace down", "stop all of it"),
    ):
        console().print(f"   [cyan]{command}[/]  {what}", soft_wrap=True)
    console().print("   in Python: [cyan]millrace_client.connect().inference.infer(…)[/]")


def summary(figures: dict[str, Any], total_s: float) -> str:
    return f"{figures['test_accuracy']:.2%} of the test digits right, in {duration_text(total_s)}."


# --- Story ---


class Story:
    """Prints a heading for each stage and records its wall time."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self._started = time.monotonic()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Time one stage, even if it fails."""
        console().print(f"\n[bold]{len(self.wall_s) + 1}  {title}[/]")
        started = time.monotonic()
        try:
            yield
        finally:
            self.wall_s[title] = time.monotonic() - started

    def say(self, text: str) -> None:
        console().print(f"   {text}", soft_wrap=True)

    def total_s(self) -> float:
        return time.monotonic() - self._started

    def print_wall_times(self) -> None:
        table = new_table("stage", "wall time", numbers=("wall time",))
        for title, seconds in self.wall_s.items():
            table.add_row(title, duration_text(seconds))
        table.add_row("[bold]all[/]", f"[bold]{duration_text(self.total_s())}[/]")
        console().print(table)


# --- Recipe ---

SEED = 17
VALIDATION_SHARE = 1 / 7
# Mean and standard deviation of MNIST's training pixels.
MEAN, STD = 0.1307, 0.3081
WORKERS = 2
GLOBAL_BATCH_ROWS = 128
# Enough for 98 % on MNIST: several epochs of a small set, one of the full one.
ROWS_TO_SEE = 18_000
MAX_EPOCHS = 15


def sources(folder_uri: str, suffix: str) -> list[data_service_pb2.ImportSource]:
    """Return MNIST's four files below a URI as the splits `train` and `test`."""
    base = folder_uri.rstrip("/")
    train_images, train_labels, test_images, test_labels = (f"{base}/{name}{suffix}" for name in FILES)
    return [idx_source("train", train_images, train_labels), idx_source("test", test_images, test_labels)]


def hold_outs() -> list[data_service_pb2.HoldOut]:
    return [hold_out("train", "validation", VALIDATION_SHARE, seed=SEED)]


def spec(version: DatasetVersion, epochs: int = 0) -> TrainingSpec:
    """Return the specification of ResNet-18 on the version; `epochs` 0: chosen by the number of rows."""
    (rows,) = (split.row_count for split in version.splits if split.name == "train")
    return training_spec(
        version.name,
        model="torchvision.resnet18",
        in_channels=1,
        num_classes=10,
        transform=[to_float(), normalize(MEAN, STD)],
        optimizer=optimizer("AdamW", 0.002, cosine=True),
        epochs=epochs or max(1, min(MAX_EPOCHS, round(ROWS_TO_SEE / rows))),
        global_batch_size=GLOBAL_BATCH_ROWS,
        num_workers=WORKERS,
        threads_per_worker=1,
        seed=SEED,
    )


# --- Test split through the served model ---

IN_FLIGHT = 64


@dataclass(frozen=True, kw_only=True)
class Served:
    """N images (N, H, W) with their labels, the model's answers, and the latency of each."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    predictions: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    latencies_s: npt.NDArray[np.float64]
    wall_s: float
    lineage: Lineage

    @property
    def accuracy(self) -> float:
        return float((self.predictions == self.labels).mean())

    @property
    def requests_per_second(self) -> float:
        return len(self.labels) / self.wall_s

    def latency_ms(self, percentile: float) -> float:
        return float(np.percentile(self.latencies_s, percentile) * 1000)


def classify_split(
    millrace: Millrace,
    model: str,
    version: str,
    split: str = "test",
    *,
    in_flight: int = IN_FLIGHT,
    on_answer: Callable[[int, int], object] | None = None,
) -> Served:
    """Send each raw image of a split as its own request.

    `on_answer` is called with the number of answers and the total.
    """
    images, labels = image_rows(millrace.data.read_table(version, split=split))
    assert labels is not None, "a version from IDX files has labels"
    started = time.perf_counter()
    answers = []
    for answer in millrace.inference.infer_many(
        model, ({"image": image[None]} for image in images), in_flight=in_flight
    ):
        answers.append(answer)
        if on_answer is not None:
            on_answer(len(answers), len(images))
    wall_s = time.perf_counter() - started
    return Served(
        images=images,
        labels=labels,
        predictions=np.array([answer.outputs["label"][0] for answer in answers], np.int64),
        probabilities=np.array([answer.outputs["probabilities"].max() for answer in answers], np.float64),
        latencies_s=np.array([answer.latency_s for answer in answers], np.float64),
        wall_s=wall_s,
        lineage=answers[-1].lineage,
    )
