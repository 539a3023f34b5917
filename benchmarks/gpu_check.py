"""`make gpu-check`: checks the GPU features of Millrace on the local GPU.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--only nccl copies resume loop serving compile compiled
                                    tutorial]

Prints a line for each check as it ends, and finally one JSON object. A failed check stops no other; the command then
fails at its end. Without a GPU the command reports that and exits with 2. `--device cpu` runs the checks themselves in
a small size on a machine without a GPU, which proves nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_runs
from benchmarks.gpu_processes import (
    CheckFailed,
    Place,
    end_processes,
    killed_and_resumed,
    killed_job,
    resumed_variants,
    seconds_to_first_step,
    whole_job,
)
from benchmarks.gpu_runs import Measured, Size, accelerated, spec_of
from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import CheckpointRegistry, load_checkpoint
from shared.storage import ObjectStore
from train_service.domain.spec import BFLOAT16, TrainingSpec
from train_service.learning.ranks import COMPILE_CACHE, DeviceBatches
from train_service.loading.loader import Batch

NO_GPU = "There is no GPU here that torch can use, so nothing of a GPU was checked."
# The sizes by device: of runs whose speed is measured, and of those that are killed and resumed.
SMALL = "torchvision.shufflenet_v2_x0_5"
MEASURED = {"cuda": Size(20_480, 128, 512, 3), "cpu": Size(192, 32, 32, 2, SMALL)}
RESUMED = {
    "cuda": Size(2_560, 64, 128, 4, checkpoint_every=15),
    "cpu": Size(160, 32, 16, 3, SMALL, checkpoint_every=4),
}
# The factor of the time limits on a CPU.
CPU_SLOWER = 4
# A check that takes longer fails with that message.
LIMITS_S = {
    "resume": 120,
    "copies": 40,
    "nccl": 60,
    "loop": 150,
    "compile": 300,
    "compiled": 240,
    "serving": 60,
    "tutorial": 480,
}
# The bars for an H100 and an H200; other GPUs are measured, and only checked for the rest.
BARS = {"ours_vs_bare": (0.85, "at least"), "busy": (0.8, "at least"), "prefetch_speedup": (1.2, "at least")}
HELD_TO_BARS = ("H100", "H200")
NCCL_TIMEOUT_S = 17.0
SERVED_ROWS, SERVED_TIMES = 64, {"cuda": 50, "cpu": 8}
# Float32 sums in another order differ by some 1e-6; products that are rounded to TF32 differ by 1e-3.
SERVED_APART = 1e-4


@dataclass
class Check:
    """The common state of the checks."""

    device: torch.device
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def measured(self) -> ObjectStore:
        return self._store("measured", MEASURED[self.device.type])

    @cached_property
    def resumed(self) -> ObjectStore:
        return self._store("resumed", RESUMED[self.device.type])

    def place(self, store: ObjectStore) -> Place:
        return Place(store, self.folder, on_cpu=not self.is_gpu)

    def limit_s(self, name: str) -> float:
        return LIMITS_S[name] * (1 if self.is_gpu else CPU_SLOWER)

    def hold(self, name: str, value: float) -> None:
        """Record a figure. Raises `CheckFailed` if it misses its bar."""
        self.figures[name] = round(value, 4)
        bar, way = BARS[name]
        missed = value < bar if way == "at least" else value > bar
        if missed and self.is_gpu and any(one in torch.cuda.get_device_name(self.device) for one in HELD_TO_BARS):
            raise CheckFailed(f"{name} is {value:.3g}, and is to be {way} {bar:g}")

    def _store(self, name: str, size: Size) -> ObjectStore:
        (self.folder / name).mkdir()
        return gpu_runs.new_store(self.folder / name, size)


def check_resume(check: Check) -> str:
    """Check that a killed run ends with the bits of an undisturbed one.

    Runs in float32, TF32, and bfloat16 with channels last.
    """
    place, size = check.place(check.resumed), RESUMED[check.device.type]
    seen: dict[str, Any] = {}
    failures: list[str] = []

    def one(variant: str, spec: TrainingSpec) -> None:
        try:
            seen[variant] = killed_and_resumed(place, variant, spec, check.limit_s("resume") - 10)
            say(f"    {variant}: {seen[variant]}")
        except CheckFailed as error:
            failures.append(str(error))
            say(f"    {error}")

    # In parallel, because most of their time is start-up.
    with ThreadPoolExecutor(4 if check.is_gpu else 1) as pool:
        list(pool.map(lambda pair: one(*pair), resumed_variants(size).items()))
    check.figures["resume"] = seen
    if failures:
        raise CheckFailed("; ".join(failures))
    resumed = ", ".join(f"{variant} at step {one['resumed_at']} of {one['steps']}" for variant, one in seen.items())
    return f"the same bits after a kill: {resumed}"


def check_copies(check: Check) -> str:
    """Compare prefetching copies from pinned memory with a plain copy at each step, with equal work on the device."""
    size = MEASURED[check.device.type]
    batches = _float_batches(size, 24)
    work = _work_like_a_copy(check.device, batches[0])
    spec = spec_of(size)

    def plain() -> None:
        for batch in batches:
            torch.from_numpy(batch.inputs).to(check.device)
            work()

    def ahead() -> None:
        for _ in DeviceBatches(spec, check.device, ahead=2).batches(one for one in batches):
            work()

    # With work on the device beside it, as in a step: a batch that is read before its copy has ended would differ.
    copied = DeviceBatches(spec, check.device, ahead=2).batches(one for one in batches)
    for batch, moved in zip(batches, copied, strict=True):
        work()
        assert isinstance(moved.device_inputs, torch.Tensor)
        if not np.array_equal(moved.device_inputs.cpu().numpy(), batch.inputs):
            raise CheckFailed("a batch on the device is not the batch that was copied")
    times: dict[str, list[float]] = {"plain": [], "ahead": []}
    for _ in range(4):
        times["plain"].append(gpu_runs.seconds_of(plain, check.device))
        times["ahead"].append(gpu_runs.seconds_of(ahead, check.device))
    plain_s, ahead_s = (min(times[name]) for name in ("plain", "ahead"))
    volume = sum(batch.inputs.nbytes for batch in batches)
    check.figures["copies_gb_per_s"] = {name: round(volume / min(one) / 1e9, 2) for name, one in times.items()}
    check.hold("prefetch_speedup", plain_s / ahead_s)
    each = batches[0].inputs.nbytes / 1e6
    return (
        f"{len(batches)} batches of {each:.1f} MB beside as much work: pinned and ahead {plain_s / ahead_s:.2f} times "
        f"as fast ({1e3 * ahead_s / len(batches):.2f} ms a batch, plain {1e3 * plain_s / len(batches):.2f} ms)"
    )


def check_nccl(check: Check) -> str:
    """Check that the service's code joins a group of one rank, which adds up, with the given timeout."""
    place = check.place(check.resumed)
    place.run("nccl", ["-m", "benchmarks.gpu_group", check.device.type, str(NCCL_TIMEOUT_S)], check.limit_s("nccl"))
    said = json.loads(place.last_lines("nccl", 1))
    check.figures["group"] = said
    is_other = check.is_gpu and said["backend"] != "nccl"
    if is_other or said["timeout_s"] != NCCL_TIMEOUT_S or said["sum"] != 3.0:
        raise CheckFailed(f"the group of {said['backend']} has {said}")
    return f"{said['backend']} {said['version']} joined with one rank, its timeout is {said['timeout_s']:g} s"


def check_loop(check: Check) -> str:
    """Measure the images a second of the loop, relative to a bare one, by precision and layout.

    Also measures how busy the GPU is meanwhile, and the cost of deterministic algorithms.
    """
    size = MEASURED[check.device.type]
    images, labels = gpu_runs.stripes(min(size.rows, 8192), size.side)
    compared: dict[str, dict[str, float]] = {}
    for name, spec in gpu_runs.settings_compared(spec_of(size)).items():
        ours = gpu_runs.run_ours(check.measured, spec, check.device)
        bare = gpu_runs.run_bare(spec, check.device, images, labels)
        compared[name] = _figures_of(ours, bare)
        say(f"    {name}: {_sentence(ours, bare)}")
        if check.is_gpu:
            torch.cuda.empty_cache()
    check.figures["loop"] = compared
    costs = {
        pair: round(compared[f"{pair}, fastest"]["images_per_s"] / compared[pair]["images_per_s"], 3)
        for pair in ("tf32", "bf16, channels last")
    }
    check.figures["cost_of_determinism"] = costs
    missed = []
    best = compared["bf16, channels last"]
    if check.is_gpu and best.get("busy") is None:
        missed.append("how busy the GPU is could not be measured")
    for name, value in (("ours_vs_bare", best["ours_vs_bare"]), ("busy", best.get("busy"))):
        try:
            if value is not None:
                check.hold(name, value)
        except CheckFailed as error:
            missed.append(str(error))
    if missed:
        raise CheckFailed("; ".join(missed))
    dear = ", ".join(f"{cost:.2f} in {name}" for name, cost in costs.items())
    return (
        f"bf16 with channels last: {best['images_per_s']:,.0f} images/s, {best['ours_vs_bare']:.2f} of a bare loop's; "
        f"the fastest algorithms would be {dear} times as fast"
    )


def check_compile(check: Check) -> str:
    """Measure the seconds to the first step with an empty cache of torch.compile, and with a warm one.

    Also checks that a killed compiled run ends with the bits of an undisturbed one.
    """
    place, limit_s = check.place(check.resumed), check.limit_s("compile")
    half = resumed_variants(RESUMED[check.device.type])["bf16"]
    cache = {COMPILE_CACHE: str(check.folder / "compiled")}
    place.run("plain", place.command("plain", replace(half, epochs=1)), limit_s)
    seen = killed_and_resumed(place, "compiled", replace(half, compile=True), limit_s, **cache)
    jobs = {"plain": "plain", "cold": whole_job("compiled"), "warm": killed_job("compiled")}
    seconds = {name: round(seconds_to_first_step(check.resumed, job), 2) for name, job in jobs.items()}
    check.figures["seconds_to_first_step"] = seconds
    text = (
        f"first step after {seconds['cold']} s with an empty cache, {seconds['warm']} s with a warm one, "
        f"{seconds['plain']} s not compiled; the same bits after a kill, from step {seen['resumed_at']} on"
    )
    if seconds["warm"] >= seconds["cold"]:
        raise CheckFailed(f"the cache saves nothing: {text}")
    return text


def check_compiled(check: Check) -> str:
    """Measure the images a second of a compiled model, relative to a compiled bare loop."""
    size = MEASURED[check.device.type]
    spec = accelerated(spec_of(size, precision=BFLOAT16, compile=True, validation_split=""), channels_last=True)
    images, labels = gpu_runs.stripes(min(size.rows, 8192), size.side)
    ours = gpu_runs.run_ours(check.measured, spec, check.device)
    say(f"    ours: {ours.images_per_s:,.0f} images/s")
    bare = gpu_runs.run_bare(spec, check.device, images, labels)
    check.figures["compiled_loop"] = _figures_of(ours, bare)
    return _sentence(ours, bare)


def check_serving(check: Check) -> str:
    """Check that a served model predicts the same classes on the device as on a CPU, and measure its time."""
    size = RESUMED[check.device.type]
    spec = replace(spec_of(replace(size, epochs=1)), seed=5)
    gpu_runs.run_ours(check.resumed, spec, check.device)
    entry = _newest(check.resumed)
    checkpoint = load_checkpoint(check.resumed, entry.folder, entry.manifest_sha256)
    images, _ = gpu_runs.stripes(SERVED_ROWS, size.side, 3)
    rows = Rows(form=RAW, values={"image": images})
    answers, milliseconds = {}, {}
    for device in dict.fromkeys(("cpu", check.device.type)):
        model = ServedModel(checkpoint, device=torch.device(device))
        model.warm_up(SERVED_ROWS)
        names = [one.name for one in model.signature.outputs]
        answers[device] = dict(zip(names, model.forward(rows).arrays, strict=True))
        for count in (1, SERVED_ROWS):
            answer = partial(model.forward, rows.slice(0, count))
            took = [gpu_runs.seconds_of(answer, torch.device(device)) for _ in range(SERVED_TIMES[device])]
            milliseconds[f"{device}, {count} rows"] = round(1e3 * statistics.median(took), 3)
    check.figures["served_ms"] = milliseconds
    here, there = (answers[device] for device in ("cpu", check.device.type))
    apart = float(np.abs(here["probabilities"] - there["probabilities"]).max())
    check.figures["served_apart"] = apart
    differ = int((here["label"] != there["label"]).sum())
    if differ or apart > SERVED_APART:
        raise CheckFailed(f"{differ} of {SERVED_ROWS} classes differ from a CPU's, and probabilities by {apart:.1e}")
    times = ", ".join(f"{one} {took} ms" for one, took in milliseconds.items())
    return f"the classes of {SERVED_ROWS} rows are a CPU's, probabilities within {apart:.1e}; {times}"


def check_tutorial(check: Check) -> str:
    """Run the tutorial's notebook (C25) unchanged, killing its trainer and its replica once each."""
    from benchmarks.gpu_tutorial import run_tutorial  # imports ray

    said = run_tutorial(check.folder / "tutorial", gpus=check.is_gpu)
    check.figures["tutorial"] = said
    return str(said["text"])


CHECKS: dict[str, Callable[[Check], str]] = {
    "nccl": check_nccl,
    "copies": check_copies,
    "resume": check_resume,
    "loop": check_loop,
    "serving": check_serving,
    "compile": check_compile,
    "compiled": check_compiled,
    "tutorial": check_tutorial,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Tries what is promised of a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS))
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, flush=True)
        return 2
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    begun = time.monotonic()
    say(f"{_name(device)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-check-") as folder:
        check = Check(device, Path(folder))
        for name in given.only:
            results[name] = _run(name, check)
            if check.is_gpu:
                torch.cuda.empty_cache()
    failed = [name for name, result in results.items() if result != "ok"]
    last = {"device": _name(device), "torch": torch.__version__, "results": results, **check.figures}
    say(json.dumps({**last, "seconds": round(time.monotonic() - begun, 1), "ok": not failed}))
    return 1 if failed else 0


def _run(name: str, check: Check) -> str:
    begun = time.monotonic()
    try:
        with _limit(check.limit_s(name)):
            text = CHECKS[name](check)
    except Exception as error:  # whatever it is, the other checks continue
        if not isinstance(error, CheckFailed):
            traceback.print_exc()
        say(f"FAILED  {name} ({time.monotonic() - begun:.1f} s): {error}")
        return f"failed: {type(error).__name__}: {error}"[:1000]
    finally:
        end_processes()
    say(f"ok      {name} ({time.monotonic() - begun:.1f} s): {text}")
    return "ok"


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def over(*_: object) -> None:
        raise CheckFailed(f"it was not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def say(text: str) -> None:
    print(text, flush=True)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _figures_of(ours: Measured, bare: Measured) -> dict[str, float]:
    compared = {
        "images_per_s": round(ours.images_per_s, 1),
        "bare_images_per_s": round(bare.images_per_s, 1),
        "ours_vs_bare": round(ours.images_per_s / bare.images_per_s, 3),
        "data_wait_share": round(ours.waited, 3),
        "epoch_ends_share": round(ours.ends, 3),
    }
    return compared if ours.busy is None else {**compared, "busy": round(ours.busy, 3)}


def _sentence(ours: Measured, bare: Measured) -> str:
    busy = "" if ours.busy is None else f", the GPU busy {ours.busy:.0%} of the time"
    return (
        f"{ours.images_per_s:,.0f} images/s, bare {bare.images_per_s:,.0f} "
        f"({ours.images_per_s / bare.images_per_s:.2f}){busy}, waiting for rows {ours.waited:.0%}, "
        f"ends of epochs {ours.ends:.0%}"
    )


def _float_batches(size: Size, count: int) -> list[Batch]:
    random = np.random.default_rng(0)
    shape = (size.batch, 3, size.side, size.side)
    labels, row_ids = np.zeros(size.batch, np.int64), np.arange(size.batch)
    return [Batch(step, 0, random.random(shape, np.float32), labels, row_ids, size.batch) for step in range(count)]


def _work_like_a_copy(device: torch.device, batch: Batch) -> Callable[[], None]:
    """Return matrix products that take the device about as long as a plain copy of the batch."""
    side = 4096 if device.type == "cuda" else 256
    matrix = torch.ones(side, side, device=device)
    inputs = torch.from_numpy(batch.inputs)

    def product() -> None:
        torch.mm(matrix, matrix)

    product()
    copy_s = statistics.median(gpu_runs.seconds_of(lambda: inputs.to(device).clone(), device) for _ in range(5))
    product_s = statistics.median(gpu_runs.seconds_of(product, device) for _ in range(5))
    count = max(1, round(copy_s / product_s))

    def work() -> None:
        for _ in range(count):
            product()

    return work


def _newest(store: ObjectStore) -> Any:
    """Return the final checkpoint of the run in this process, the newest in the store."""
    names = {key.split("/")[1] for key in (one.key for one in store.list("trainingJobs/"))}
    entries = [
        entry for name in names for entry in CheckpointRegistry(store, f"trainingJobs/{name}").entries() if entry.final
    ]
    return max(entries, key=lambda one: one.create_time)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
