"""`make bench-data`: ingest, transforms and reading of the data service, relative to pyarrow and plain Ray Data.

All contenders process the same MNIST digits (MNIST_ROOT, or ../shared/data/mnist), repeated, on one store and one Ray
head: real service processes, the client in its own process, Ray's peers in another. Runs are interleaved, each on an
idle machine; ratios are of medians. The last line is one JSON object, which lists the bars that are met.

    python -m benchmarks.data [--store file|s3] [--rows 200000] [--repeats 3] [--only ingest transform read memory]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import millrace_client
from benchmarks import data_client, data_ray
from benchmarks.cpu_idle import come_to_rest
from benchmarks.data_memory import PeakMemory
from benchmarks.data_report import Rates, report
from benchmarks.data_rows import mnist_folder
from benchmarks.signals import exit_on_signals
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.storage.object_store import ensure_bucket
from tests.support.ray_head import RayHead, ray_head
from tests.support.s3_server import find_program, running
from tests.support.service_process import ServiceProcess, running_service, store_environ

MIN_ROWS = 200_000
# The rows of the tutorial's variant, whose rate is applied to any number of rows: enough that its start-up counts
# little.
ROW_MAP_ROWS = 200_000
# Otherwise Ray ends idle workers as others start, and each contender would pay for ending those of the one before it.
WORKERS_STAY = {"RAY_num_workers_soft_limit": "32"}
GROWTH = 10
PARTS = ("ingest", "transform", "read", "memory")


@dataclass(frozen=True)
class Bench:
    settings: StoreSettings
    head: RayHead
    service: ServiceProcess
    client: ProcessPoolExecutor
    ray: ProcessPoolExecutor
    rows: int
    repeats: int

    def in_client(self, task: Callable[..., Any], *arguments: Any) -> Any:
        return self.client.submit(task, *arguments).result()

    def in_ray(self, task: Callable[..., Any], *arguments: Any) -> Any:
        return self.ray.submit(task, *arguments).result()

    def new_dataset(self, dataset_id: str) -> str:
        with millrace_client.connect(data=self.service.address) as client:
            return client.data.create_dataset(dataset_id).name

    def files_of(self, version: str) -> list[str]:
        keys = (info.key for info in open_store(self.settings).list(f"{version}/data"))
        return sorted(key for key in keys if key.endswith(".parquet"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-data")
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    parser.add_argument("--rows", type=int, default=MIN_ROWS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    exit_on_signals()
    if not mnist_folder().is_dir():
        sys.exit(f"bench-data: no {mnist_folder()}; set MNIST_ROOT to a folder that torchvision's MNIST reads")
    rates, sizes = _throughput(given) if set(given.only) - {"memory"} else ({}, {})
    memory = _memory(given.store, given.rows) if "memory" in given.only else {}
    said = {"store": given.store, "rows": given.rows, "row_map_rows": ROW_MAP_ROWS, "repeats": given.repeats}
    said["ray_head_has"] = " ".join(f"{name}={value}" for name, value in WORKERS_STAY.items())
    print(json.dumps(report(rates, memory, said, sizes)))


def _throughput(given: argparse.Namespace) -> tuple[Rates, dict[str, int]]:
    """Return the rates, and the bytes of a version and of a file that plain pyarrow writes of the same rows."""
    rates: Rates = {}
    with (
        _place(given.store, WORKERS_STAY) as (settings, head, folder),
        _bench(settings, head, folder, given.rows, given.repeats) as bench,
    ):
        if "ingest" in given.only:
            rates |= _ingest(bench)
        dataset = bench.new_dataset("digits")
        _, version = bench.in_client(data_client.ingest, bench.service.address, dataset, bench.rows, None)
        if "transform" in given.only:
            rates |= _transforms(bench, version)
        if "read" in given.only:
            rates |= _reading(bench, version)
        store = open_store(settings)
        sizes = {
            "version": sum(info.size_bytes for info in store.list(f"{version}/data") if info.key.endswith(".parquet")),
            "pyarrow": bench.in_client(data_client.size_with_pyarrow, settings, bench.rows),
        }
    return rates, sizes


@contextmanager
def _place(store: str, environ: Mapping[str, str]) -> Iterator[tuple[StoreSettings, RayHead, Path]]:
    """Provide an empty store, a Ray head and a folder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-data-")))
        settings = _store(stack, store, folder)
        # The environment is left out where memory is measured: workers that stay would count as ours.
        head = stack.enter_context(ray_head(num_cpus=os.cpu_count() or 1, environ=environ))
        yield settings, head, folder


def _store(stack: ExitStack, kind: str, folder: Path) -> StoreSettings:
    if kind == "file":
        return StoreSettings(url=(folder / "store").as_uri())
    (folder / "s3").mkdir()
    server = stack.enter_context(running(find_program(), folder / "s3"))
    settings = server.settings("s3://bench/data")
    ensure_bucket(settings)
    return settings


@contextmanager
def _bench(settings: StoreSettings, head: RayHead, folder: Path, rows: int, repeats: int) -> Iterator[Bench]:
    environ = {**store_environ(settings), "RAY_ADDRESS": head.address}
    spawn = multiprocessing.get_context("spawn")
    with (
        running_service("data_service", environ, folder / "service.log") as service,
        ProcessPoolExecutor(1, mp_context=spawn) as client,
        ProcessPoolExecutor(1, mp_context=spawn, initializer=data_ray.connect, initargs=(head.address,)) as peers,
    ):
        bench = Bench(settings, head, service, client, peers, rows, repeats)
        bench.in_client(data_client.warm_up, rows)
        yield bench


# --- throughput: rows/s of each contender, run by run ------------------------------------------------------------


def _interleaved(bench: Bench, contenders: Mapping[str, Callable[[], float]]) -> Rates:
    rates: Rates = {name: [] for name in contenders}
    for number in range(bench.repeats + 1):
        for name, run in contenders.items():
            come_to_rest()
            rate = bench.rows / run()
            if number:  # the first round warms up
                rates[name].append(rate)
                print(f"{name}: {rate:,.0f} rows/s", flush=True)
    return rates


def _ingest(bench: Bench) -> Rates:
    dataset = bench.new_dataset("ingested")

    def ours(compression: str | None) -> Callable[[], float]:
        def run() -> float:
            took_s, version = bench.in_client(
                data_client.ingest, bench.service.address, dataset, bench.rows, compression
            )
            bench.in_client(data_client.delete, bench.service.address, version)
            return float(took_s)

        return run

    def peer(as_bytes: bool) -> float:
        return float(bench.in_client(data_client.write_with_pyarrow, bench.settings, bench.rows, as_bytes))

    return _interleaved(
        bench,
        {
            "ingest": ours(None),
            "ingest_lz4": ours("lz4"),
            "pyarrow_write": lambda: peer(True),
            "pyarrow_write_as_it_is": lambda: peer(False),
        },
    )


def _transforms(bench: Bench, source: str) -> Rates:
    paths = bench.files_of(source)

    def ours() -> float:
        took_s, version = bench.in_client(data_client.transform, bench.service.address, source)
        bench.in_client(data_client.delete, bench.service.address, version)
        return float(took_s)

    def peer(paths: list[str], batch_size: int | None, form: str) -> float:
        arguments = bench.settings, paths, "peers/batches", batch_size, form
        return float(bench.in_ray(data_ray.map_batches, *arguments))

    def row_map(form: str) -> float:
        took_s = bench.in_ray(data_ray.row_map, bench.settings, ROW_MAP_ROWS, "peers/rows", form)
        # The time that all rows would take.
        return float(took_s * bench.rows / ROW_MAP_ROWS)

    peer(paths[:1], data_ray.BATCH_SIZES[0], data_ray.FORMS[0])  # starts Ray's workers
    tried = {}
    for form in data_ray.FORMS:
        for batch_size in data_ray.BATCH_SIZES:
            tried[batch_size, form] = peer(paths[:1], batch_size, form)
            print(f"map_batches of one file, batch {batch_size}, {form}: {tried[batch_size, form]:.2f} s", flush=True)
    best = min(tried, key=lambda one: tried[one])
    contenders: dict[str, Callable[[], float]] = {
        "transform": ours,
        "ray_map_batches": lambda: peer(paths, *best),
        "ray_row_map": lambda: row_map("lists"),
        "ray_row_map_of_bytes": lambda: row_map("bytes"),
    }
    return _interleaved(bench, contenders)


def _reading(bench: Bench, version: str) -> Rates:
    paths = bench.files_of(version)

    def peer(together: bool) -> float:
        return float(bench.in_client(data_client.read_with_pyarrow, bench.settings, paths, bench.rows, together))

    return _interleaved(
        bench,
        {
            "read": lambda: bench.in_client(data_client.read, bench.service.address, version, bench.rows),
            "pyarrow_read": lambda: peer(False),
            "pyarrow_read_together": lambda: peer(True),
        },
    )


# --- memory -----------------------------------------------------------------------------------------------------


def _memory(store: str, rows: int) -> dict[str, float]:
    """Return the peak memory of upload, import and transform, on a new service, head and store."""
    peaks = {}
    for times in (1, GROWTH):
        with _place(store, {}) as (settings, head, folder), _bench(settings, head, folder, rows * times, 1) as bench:
            dataset = bench.new_dataset(f"times{times}")
            memory = PeakMemory(bench.service, head)
            with memory.measured():
                _, source = bench.in_client(data_client.ingest, bench.service.address, dataset, bench.rows, None)
                bench.in_client(data_client.transform, bench.service.address, source)
            peaks[f"idle_{times}x_mib"] = round(memory.idle_bytes / 2**20, 1)
            peaks[f"peak_{times}x_mib"] = round(memory.peak_bytes / 2**20, 1)
            print(f"memory at {times}x: {peaks[f'peak_{times}x_mib']} MiB", flush=True)
    return {**peaks, "rss_growth": round(peaks[f"peak_{GROWTH}x_mib"] / peaks["peak_1x_mib"], 3)}


if __name__ == "__main__":
    main()
