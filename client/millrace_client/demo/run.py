"""The demonstration's stages, in order. Each is a call of a service; nothing here knows how they work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.train.v1 import resources_pb2
from millrace_client.cli.data_import import wait_with_rows
from millrace_client.cli.exits import CommandFailed
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.output import console, duration_text
from millrace_client.cli.progress import Curves, TrainingView
from millrace_client.connection import Millrace
from millrace_client.demo import recipe
from millrace_client.demo.serving import IN_FLIGHT, Served, classify_split
from millrace_client.demo.story import Story
from millrace_client.errors import NotFound

DATASET = "digits"


def run(
    millrace: Millrace, story: Story, *, folder_uri: str, suffixes: tuple[str, ...], epochs: int, output: Path
) -> dict[str, Any]:
    """Import, train, deploy, ask, draw. Returns the figures as JSON-able values."""
    with story.stage("Import the digits"):
        version = import_digits(millrace, folder_uri, suffixes)
        splits = " · ".join(f"{split.name} {split.row_count:,}" for split in version.splits)
        story.tell(f"[cyan]{version.name}[/]: {splits} images")
    run_id = free_id(millrace)
    with story.stage("Train ResNet-18 on two workers"):
        job, curves = train(millrace, recipe.spec(version, epochs), run_id)
        best = job.best_checkpoint.rpartition("/")[2]
        story.tell(f"[cyan]{job.name}[/] succeeded after {job.progress.step} steps; best checkpoint: {best}")
    with story.stage("Deploy the best checkpoint"):
        with console().status("loading the model …"):
            deployment = millrace.deployments.create_deployment(run_id, job.best_checkpoint).wait()
        story.tell(f"[cyan]{deployment.name}[/] answers as model [bold]{run_id}[/]")
    with story.stage("Ask it about the test split"):
        served = ask(millrace, run_id, version.name)
        story.tell(
            f"{len(served.labels):,} requests with raw uint8 images, {IN_FLIGHT} in flight: "
            f"[bold]{served.requests_per_second:,.0f} requests/s[/], "
            f"p50 {served.latency_ms(50):.0f} ms, p99 {served.latency_ms(99):.0f} ms"
        )
        story.tell(f"test accuracy [bold green]{served.accuracy:.2%}[/]")
    with story.stage("Draw the pictures"):
        pictures = draw(served, curves, output)
        story.tell("  ".join(str(path) for path in pictures))
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
    """Imports with the first suffix whose files the server finds."""
    millrace.data.create_dataset(DATASET, display_name="Handwritten digits", exist_ok=True)
    for suffix in suffixes:
        operation = millrace.data.import_version(
            f"datasets/{DATASET}", recipe.sources(folder_uri, suffix), hold_outs=recipe.hold_outs()
        )
        try:
            return wait_with_rows(operation)
        except NotFound:
            if suffix == suffixes[-1]:
                raise
    raise ValueError("name at least one suffix")


def free_id(millrace: Millrace) -> str:
    """`digits`, or `digits-2` and so on where jobs or deployments of earlier demonstrations are still there."""
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
    """Trains with a live view. Raises `CommandFailed` unless it succeeds; interrupted, it cancels the job."""
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
    """What to type while the stack is up."""
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
