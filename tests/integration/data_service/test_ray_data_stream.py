"""On a real cluster: whoever stops taking a dataset's tables finds no task at work any more, however it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ray_head import RayHead

TIMEOUT_S = 400.0
# Tasks that write on and on, and that no interrupt ends; before the first table has come the stream is left. Tells how
# it ended, what they had written then, and what a while later. One driver for all, since its start takes longest.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import ray, ray.data
from shared.ray_data_stream import DatasetStream, RayFailed, quiet_context
from shared.errors import Cancelled

def writing(folder, crashes):
    def write(row):
        if crashes and row["item"] == 0:
            while not (folder / "1").exists():
                time.sleep(0.05)
            os._exit(1)
        number = 0
        while True:
            try:
                number += 1
                (folder / str(row["item"])).write_text(str(number))
                time.sleep(0.02)
            except BaseException:
                pass
    return write

class Writer:
    def __init__(self, folder):
        self._write = writing(folder, False)

    def __call__(self, row):
        self._write(row)

def written_in(folder):
    return [path.read_text() for path in sorted(folder.iterdir())]

def run(when, folder):
    def stop():
        submitted = sum(op.num_active_tasks() for executor in stream._executors for op in executor._topology)
        if when != "one crashes" and any(folder.iterdir()) and submitted == tasks:
            raise Cancelled("a client wishes an end")

    with ray.data.DataContext.current(quiet_context(block_bytes=16)):
        tasks = 2 * CPUS if when == "others wait" else 2
        given = ray.data.from_items(list(range(tasks)), override_num_blocks=tasks)
        if when == "in a pool":
            pool = ray.data.ActorPoolStrategy(size=2)
            dataset = given.map(
                Writer, fn_constructor_args=(folder,), compute=pool, num_cpus=1, max_restarts=-1, max_task_retries=1
            )
        else:
            dataset = given.map(writing(folder, when == "one crashes"), num_cpus=1, max_retries=0)
    stream = DatasetStream(dataset, 2 if when == "others wait" else 1)
    try:
        next(stream.tables(stop, 0.02))
    except (Cancelled, RayFailed) as error:
        written, later = written_in(folder), []
        # Ray calls an actor dead when it has sent the signal; on a busy machine the process ends some moments later.
        dies_until_s = time.monotonic() + (120 if when == "in a pool" else 0)
        while True:
            time.sleep(0.5)
            later = written_in(folder)
            if later == written or time.monotonic() > dies_until_s:
                return type(error).__name__, written, later
            written = later

ray.init(address=sys.argv[1], log_to_driver=False)
CPUS = int(ray.cluster_resources()["CPU"])
folders = {when: Path(sys.argv[2]) / when for when in sys.argv[3:]}
for folder in folders.values():
    folder.mkdir()
reported = {when: run(when, folder) for when, folder in folders.items()}
Path(sys.argv[2], "results.json").write_text(json.dumps(reported))  # Ray prints what it has to say, at any time
"""
# Where others wait, Ray has a second task for each CPU.
CASES = {"at work": "Cancelled", "others wait": "Cancelled", "in a pool": "Cancelled", "one crashes": "RayFailed"}


@pytest.fixture(scope="module")
def reported(
    data_ray: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, list[str], list[str]]]:
    folder: Path = tmp_path_factory.mktemp("written")
    program = [sys.executable, "-c", PROGRAM, data_ray.address, str(folder), *CASES]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, tuple[str, list[str], list[str]]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("when", CASES)
def test_no_task_runs_any_more_when_the_stream_has_ended(
    reported: dict[str, tuple[str, list[str], list[str]]], when: str
) -> None:
    how, written, later = reported[when]
    assert how == CASES[when]
    assert written
    assert later == written
