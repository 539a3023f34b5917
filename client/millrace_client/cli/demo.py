"""`millrace demo`: from raw digits to a served model, as a client of the three services and nothing else.

The command uses running services, or starts its own stack and stops it at the end.

Each stage only calls a service, and a `Story` prints it with figures and wall times. The recipe defines the data, the
model and the epochs. At the end the test split is sent to the served model, which shows its answers, accuracy and
speed. The digits come from the first source that works, as IDX files in one folder.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import numpy as np
import numpy.typing as npt

from millrace.common.v1.lineage_pb2 import Lineage
from millrace.data.v1 import data_service_pb2
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.train.v1 import resources_pb2
from millrace.train.v1.resources_pb2 import TrainingSpec
from millrace_client.calls import millrace_home, resolve
from millrace_client.cli.command import (
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    duration_text,
    json_option,
    new_table,
    print_json,
    silent,
)
from millrace_client.cli.data import wait_with_rows
from millrace_client.cli.deployments import print_lineage
from millrace_client.cli.progress import Curves, TrainingView
from millrace_client.cli.stack import start_with_progress
from millrace_client.connection import Millrace
from millrace_client.data import image_rows
from millrace_client.errors import NotFound
from millrace_client.specs import hold_out, idx_source, optimizer, training_spec
from millrace_client.stack import supervisor
from millrace_client.stack.supervisor import StackOptions
from millrace_client.steps import normalize, to_float

# --- Demo ---


@click.command(cls=PlainCommand)
@click.option("--keep", is_flag=True, envvar="KEEP", help="Leave the stack up at the end.  [KEEP=1]")
@click.option(
    "--mnist-uri",
    metavar="URI",
    help="The folder with MNIST's IDX files as the data service sees it, e.g. file:///import/mnist/MNIST/raw.",
)
@click.option("--epochs", default=0, metavar="N", help="Default: by the number of training images.")
@click.option(
    "--output",
    default=Path("demo-output"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the pictures go.",
)
@address_options
@json_option
def demo(keep: bool, mnist_uri: str | None, epochs: int, output: Path, as_json: bool, **values: Any) -> None:
    """From raw digits to a served model, on this machine.

    Starts a stack with an empty store of its own and stops it at the end, unless one runs already, here or at the
    addresses that arguments or the environment name.
    """
    with silent(as_json):
        story = Story()
        figures = _run(story, keep, mnist_uri, epochs, output, values)
    if as_json:
        print_json({**figures, "wall_s": story.wall_s, "total_s": story.total_s()})


def _run(
    story: Story, keep: bool, mnist_uri: str | None, epochs: int, output: Path, values: dict[str, Any]
) -> dict[str, Any]:
    console().print("[bold]Millrace[/]: from raw digits to a served model")
    elsewhere = is_elsewhere(values["data_address"], values["train_address"], values["inference_address"])
    digits = None if mnist_uri else _find(story)
    roots = (digits.folder,) if digits else _local_folder(mnist_uri)
    with nullcontext() if elsewhere else a_stack(story, roots, keep=keep):
        if digits is not None:
            mnist_uri = digits.folder.as_uri() if elsewhere else readable_uri(digits)
        assert mnist_uri is not None
        suffixes = (digits.suffix,) if digits else (".gz", "")
        with connected(values) as millrace:
            figures = run(millrace, story, folder_uri=mnist_uri, suffixes=suffixes, epochs=epochs, output=output)
        if keep:
            print_how_to_talk(figures["model"], figures["dataset_version"])
    console().print()
    story.print_wall_times()
    console().print(f"[bold]{summary(figures, story.total_s())}[/]")
    return figures


def _local_folder(uri: str | None) -> tuple[Path, ...]:
    """Return the folder of a `file:` URI, for the demo's own stack to read; none for other URIs."""
    parts = urlsplit(uri or "")
    return (Path(unquote(parts.path)),) if parts.scheme == "file" else ()


def _find(story: Story) -> Digits:
    with console().status("looking for digits …"):
        try:
            digits = find_digits(millrace_home() / "digits")
        except NoDigits as error:
            raise CommandFailed(str(error), remedy="set MNIST_ROOT to a folder with MNIST's four IDX files") from None
    story.say(f"digits from {digits.source}")
    return digits


# --- Where it runs ---


def is_elsewhere(data: str | None, train: str | None, inference: str | None) -> bool:
    """Return whether arguments or the environment name services outside this stack."""
    origins = resolve(data=data, train=train, inference=inference).origins
    return bool({"argument", "environment"} & set(origins.values()))


@contextmanager
def a_stack(story: Story, import_roots: tuple[Path, ...], *, keep: bool) -> Iterator[None]:
    """A stack to run the demo on.

    A running stack is used and left running. Otherwise a stack with an empty store of its own is started, and stopped
    in any case.
    """
    home = millrace_home()
    if supervisor.running_record(home) is not None:
        story.say("uses the stack that is already running, and leaves it running")
        yield
        return
    store = _empty_store(home)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with story.stage("Start the stack"):
            options = StackOptions(store=store, import_roots=import_roots)
            stack = start_with_progress(home, options, lifeline=True)
            story.say(f"Ray and the data, train and inference services answer; logs in {_short(home / 'logs')}")
        yield
        if keep:
            stack.keep()
            return
    except BaseException:
        _end(home)
        raise
    with story.stage("Stop the stack"):
        _end(home)
        story.say("nothing of it is left running")


def _end(home: Path) -> None:
    """Stop the stack. A second Ctrl-C is ignored, because the lifeline would end the stack anyway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with console().status("stopping the stack …"):
            supervisor.stop(home)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _empty_store(home: Path) -> str:
    """Return an empty folder for this demonstration. MILLRACE_STORE, if it is set, stays unchanged."""
    if os.environ.get("MILLRACE_STORE"):
        return ""
    folder = home / "demo-store"
    shutil.rmtree(folder, ignore_errors=True)
    return folder.as_uri()


def readable_uri(digits: Digits) -> str:
    """Return the digits' folder as a URI below an import root of the running stack.

    Files outside the roots are copied below one.
    """
    record = supervisor.running_record(millrace_home())
    folder = digits.folder
    if record is not None and not any(folder.is_relative_to(root) for root in record.import_roots):
        folder = Path(record.import_roots[0]) / "digits"
        folder.mkdir(parents=True, exist_ok=True)
        for file in digits.files():
            shutil.copyfile(file, folder / file.name)
    return folder.as_uri()


def _short(path: Path) -> Any:
    """Return the path relative to the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# --- Stages ---

DATASET = "digits"


def run(
    millrace: Millrace, story: Story, *, folder_uri: str, suffixes: tuple[str, ...], epochs: int, output: Path
) -> dict[str, Any]:
    """Import, train, deploy, predict, draw. Return the figures as JSON values."""
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


# --- Digits ---

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
# torchvision tries several mirrors; without a network each fails at once.
DOWNLOAD_TIMEOUT_S = 120.0
SKLEARN_TRAIN_ROWS = 1500
SIDE = 28

# Run in its own process, because the client does not import torch.
DOWNLOAD = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"


class NoDigits(Exception):
    """No source worked. The text has each source's problem."""


@dataclass(frozen=True)
class Digits:
    """MNIST's four IDX files in `folder`; each name ends with `suffix` (`.gz` or nothing)."""

    source: str
    folder: Path
    suffix: str

    def files(self) -> list[Path]:
        return [self.folder / f"{name}{self.suffix}" for name in FILES]


def find_digits(cache: Path, environ: Mapping[str, str] = os.environ) -> Digits:
    """Try MNIST_ROOT, ../shared/data/mnist, torchvision's download and scikit-learn's digits, in this order.

    Downloaded or generated files are kept in `cache`. Raises `NoDigits`.
    """
    refusals = []
    for source, locate in _sources(cache, environ):
        try:
            found = _look_in(locate())
        except (OSError, subprocess.SubprocessError) as error:
            refusals.append(f"{source}: {error}")
            continue
        if found is not None:
            return Digits(source, *found)
        refusals.append(f"{source}: no IDX files of MNIST's names there")
    raise NoDigits("found no digits; " + "; ".join(refusals))


def _sources(cache: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], Path]]]:
    given = environ.get("MNIST_ROOT")
    if given:
        yield f"MNIST_ROOT={given}", lambda: Path(given)
    yield "../shared/data/mnist", lambda: Path("../shared/data/mnist")
    yield "torchvision's download", lambda: _download(cache / "torchvision")
    yield "scikit-learn's 8×8 digits, scaled up", lambda: _small_digits(cache / "scikit-learn")


def _look_in(root: Path) -> tuple[Path, str] | None:
    """Return the folder and the suffix of the files, at `root` or where torchvision puts them below it."""
    for folder in (root / "MNIST" / "raw", root / "raw", root):
        for suffix in (".gz", ""):
            if all((folder / f"{name}{suffix}").is_file() for name in FILES):
                return folder.resolve(), suffix
    return None


def _download(root: Path) -> Path:
    if _look_in(root) is None:
        root.mkdir(parents=True, exist_ok=True)
        _python(DOWNLOAD, str(root))
    return root


def _small_digits(root: Path) -> Path:
    """Write 1,797 digits of 8×8 pixels, 0..16, as 28×28 pixels, 0..255."""
    if _look_in(root) is None:
        with gzip.open(_sklearn_folder() / "datasets" / "data" / "digits.csv.gz", "rt") as file:
            rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        # Neighbouring rows come from the same writer; shuffled, each split has all writers.
        rows = np.random.default_rng(0).permutation(rows)
        images = np.stack([_scaled_up(one) for one in rows[:, :64].reshape(-1, 8, 8)])
        labels = np.ascontiguousarray(rows[:, 64])
        root.mkdir(parents=True, exist_ok=True)
        for part, chosen in (("train", slice(0, SKLEARN_TRAIN_ROWS)), ("t10k", slice(SKLEARN_TRAIN_ROWS, None))):
            write_idx(root / f"{part}-images-idx3-ubyte", images[chosen])
            write_idx(root / f"{part}-labels-idx1-ubyte", labels[chosen])
    return root


def _sklearn_folder() -> Path:
    """Return scikit-learn's folder, whose data can be read without importing it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("scikit-learn is not installed")
    return Path(found.submodule_search_locations[0])


def _scaled_up(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    from PIL import Image

    small = Image.fromarray((image * 15).astype(np.uint8))
    return np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.uint8)


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    """Write uint8 values of any shape in the IDX format."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def _python(code: str, *arguments: str) -> None:
    command = (sys.executable, "-c", code, *arguments)
    done = subprocess.run(command, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise OSError(last[0] if last else f"exit status {done.returncode}")


# --- Pictures ---

COLUMNS, ROWS = 12, 8
# At most half of the sheet, so that correct predictions are shown as well.
MAX_WRONG = COLUMNS * ROWS // 2
INK, MUTED, RIGHT, WRONG, ACCENT = "#1f2933", "#7b8794", "#2f855a", "#c53030", "#2b6cb0"


def contact_sheet(served: Served, path: Path) -> None:
    """Draw digits with labels and predictions: wrong ones first, framed in red, then correct ones."""
    plt = _pyplot()
    wrong = np.flatnonzero(served.predictions != served.labels)
    right = np.flatnonzero(served.predictions == served.labels)
    chosen = [*wrong[:MAX_WRONG], *right][: COLUMNS * ROWS]
    rows = -(-len(chosen) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(COLUMNS * 1.0, rows * 1.22 + 0.9), squeeze=False)
    figure.suptitle(
        f"{len(served.labels) - len(wrong):,} of {len(served.labels):,} test digits right ({served.accuracy:.1%})",
        color=INK,
        fontsize=14,
        fontweight="bold",
        x=0.02,
        y=1 - 0.22 / figure.get_figheight(),
        ha="left",
        va="top",
    )
    figure.text(
        0.02,
        1 - 0.56 / figure.get_figheight(),
        "label → prediction; wrong ones are framed"
        + (f" ({MAX_WRONG} of {len(wrong)} shown)" if len(wrong) > MAX_WRONG else "")
        + f" · {served.lineage.deployment}, version {served.lineage.model_version}",
        color=MUTED,
        fontsize=9,
        ha="left",
        va="top",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, index in zip(axes.flat, chosen, strict=False):
        label, prediction = served.labels[index], served.predictions[index]
        axis.imshow(served.images[index], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
        is_right = label == prediction
        axis.set_title(
            f"{label} → {prediction}",
            color=RIGHT if is_right else WRONG,
            fontsize=9,
            fontweight="normal" if is_right else "bold",
            pad=3,
        )
        if not is_right:
            side = served.images[index].shape[0]
            axis.add_patch(
                plt.Rectangle((-0.5, -0.5), side, side, fill=False, edgecolor=WRONG, linewidth=3, clip_on=False)
            )
    top = 1 - 1.0 / figure.get_figheight()
    figure.subplots_adjust(left=0.02, right=0.98, top=top, bottom=0.02, wspace=0.12, hspace=0.32)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def learning_curves(curves: Curves, served: Served, path: Path) -> None:
    """Draw loss and accuracy over the steps of training and validation, with the served model's test accuracy."""
    plt = _pyplot()
    figure, (loss_axis, accuracy_axis) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column, title in ((loss_axis, 1, "Loss"), (accuracy_axis, 2, "Accuracy")):
        if curves.training:
            training = np.array(curves.training)
            axis.plot(training[:, 0], training[:, column], color=ACCENT, linewidth=1.4, label="training")
        if curves.validation:
            validation = np.array(curves.validation)
            axis.plot(
                validation[:, 0], validation[:, column], color=RIGHT, marker="o", linewidth=1.8, label="validation"
            )
        axis.set_title(title, loc="left", color=INK, fontweight="bold")
        axis.set_xlabel("step", color=MUTED)
        axis.tick_params(colors=MUTED)
        axis.grid(axis="y", color="#e4e7eb")
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.spines["bottom"].set_color("#cbd2d9")
    loss_axis.set_ylim(bottom=0)
    accuracy_axis.axhline(
        served.accuracy, color=WRONG, linestyle="--", linewidth=1.2, label=f"test, as served ({served.accuracy:.1%})"
    )
    accuracy_axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    accuracy_axis.set_ylim(top=1.005)
    loss_axis.legend(frameon=False)
    accuracy_axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
