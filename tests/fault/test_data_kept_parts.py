"""SIGKILLs to workers, attempts and nodes while a transform works: each part that was kept is never done again."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from google.longrunning import operations_pb2

from data_service.version_attempt import header_of
from millrace.data.v1.resources_pb2 import DatasetVersion
from shared.dataset_version.manifest import tensor_array
from shared.settings import StoreSettings
from shared.storage import ObjectMissing
from tests.fault.test_data_kills_while_fitting import judged
from tests.support.data_place import AT_WORK, WORKER, DataPlace, Gate, data_place
from tests.support.data_strikes import uploaded
from tests.support.faults import Faults
from tests.support.process_states import stop_process
from tests.support.ray_head import NONE_WARM, RayNode, ray_head, ray_node
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

# Images whose floats are 16 KiB a row: 16 parts of some 500 rows, in each of four passes.
ROWS, SIDE = 8_192, 64
PASSES, PARTS = 4, 16
# A job fails with the fourth attempt that is lost.
LOST_ATTEMPTS = 3
STRIKE_TIMEOUT_S = 300.0
RECORD = re.compile(r"/data/(?P<attempt>[^/]+)/kept/(?P<part>.+)")
MARKER = re.compile(r"/begun/(?P<number>\d+)-")


@dataclass
class Cluster:
    """A head that computes nothing, and nodes of one CPU that come and go."""

    place: DataPlace
    nodes: list[tuple[RayNode, ExitStack]] = field(default_factory=list)
    started: int = 0

    def add_node(self, num_cpus: int = 1) -> None:
        stack, self.started = ExitStack(), self.started + 1
        node = stack.enter_context(ray_node(self.place.head, f"node-{self.started}", num_cpus=num_cpus))
        self.nodes.append((node, stack))

    def remove_node(self) -> None:
        node, stack = self.nodes.pop(0)
        node.kill()
        stack.close()

    def replace_node(self) -> None:
        self.remove_node()
        self.add_node()

    def processes(self, title: str) -> list[int]:
        nodes: list[RayNode] = [self.place.head, *(node for node, _ in self.nodes)]
        return [pid for node in nodes for pid in node.processes(title)]


@contextmanager
def two_nodes(settings: StoreSettings, folder: Path) -> Iterator[Cluster]:
    with ray_head(num_cpus=0, environ=NONE_WARM) as head, data_place(settings, head, folder) as place:
        cluster = Cluster(place)
        try:
            for _ in range(2):
                cluster.add_node()
            yield cluster
        finally:
            for _, stack in cluster.nodes:
                stack.close()


@dataclass
class Watched:
    """A transform under way, and which execution of each part was kept first."""

    cluster: Cluster
    started: operations_pb2.Operation
    version: str
    kept: dict[str, str] = field(default_factory=dict)
    done_again: list[str] = field(default_factory=list)
    lost: int = 0
    _read: set[str] = field(default_factory=set)

    @property
    def place(self) -> DataPlace:
        return self.cluster.place

    @property
    def attempt(self) -> str:
        """The newest attempt's folder; empty before the first."""
        return max(self.place.store.folders(f"{self.version}/data"), default="")

    def is_over(self) -> bool:
        """Look at the newest attempt's records meanwhile. A lost attempt may still be adding to its own."""
        attempt = self.attempt
        for key in self.place.records_of(self.version):
            found = RECORD.search(key)
            if found and found["attempt"] == attempt and key not in self._read:
                with suppress(ObjectMissing):
                    execution = header_of(self.place.store.get(key)).execution
                    if self.kept.setdefault(found["part"], execution) != execution:
                        self.done_again.append(found["part"])
                    self._read.add(key)
        return bool(self.place.operation(self.started.name).done)

    def wait_for_progress(self, parts: int) -> None:
        wanted = len(self.kept) + parts
        wait_until(lambda: self.is_over() or len(self.kept) >= wanted, "more parts", STRIKE_TIMEOUT_S, 0.1)

    def working(self) -> dict[int, list[int]]:
        """The processes that began each part, in the present pass of the newest attempt, and did not end it."""
        found: dict[int, list[int]] = defaultdict(list)
        for info in self.place.store.list(f"{self.version}/data/{self.attempt}/begun"):
            if marker := MARKER.search(info.key):
                with suppress(ObjectMissing):
                    found[int(marker["number"])].append(int(self.place.store.get(info.key)))
        return found


def strike_worker(watched: Watched) -> bool:
    """Kill a worker on a part that was not struck before: after two deaths the custom function would be to blame."""
    for number, pids in watched.working().items():
        if len(pids) > 1 or pids[0] not in watched.cluster.processes(WORKER):
            continue
        with suppress(ProcessLookupError):
            stop_process(pids[0])
            if watched.working().get(number) == pids:  # it still has that part, and cannot go on to another
                os.kill(pids[0], signal.SIGKILL)
                return True
            os.kill(pids[0], signal.SIGCONT)
    return False


def strike_attempt(watched: Watched) -> bool:
    attempt = watched.attempt
    for pid in watched.cluster.processes(AT_WORK):
        os.kill(pid, signal.SIGKILL)
    watched.lost += 1
    wait_until(lambda: watched.is_over() or watched.attempt > attempt, "the next attempt", STRIKE_TIMEOUT_S, 0.1)
    return True


def strike_node(watched: Watched) -> bool:
    """Kill a node with all its processes, once no part is under way that was struck before."""
    alive = set(watched.cluster.processes(WORKER))
    if any(set(pids) - alive for pids in watched.working().values()):
        return False
    watched.cluster.replace_node()
    watched.lost += 1  # the attempt may have been there
    return True


STRIKES = {"worker": strike_worker, "attempt": strike_attempt, "node": strike_node}


def strike_until_over(watched: Watched, kinds: list[str], faults: Faults) -> None:
    """Strike in the order of `kinds`, from which those that were struck are removed, while the transform works."""
    while not watched.is_over():
        possible = [kind for kind in kinds if kind == "worker" or watched.lost < LOST_ATTEMPTS]
        if possible and STRIKES[possible[0]](watched):
            kinds.remove(possible[0])
            faults.add(f"SIGKILL {possible[0]}", "transform, parts kept", "S3")
            watched.wait_for_progress(1)


def images_stream() -> bytes:
    generator = np.random.default_rng(3)
    keys = np.arange(ROWS)
    keys[-50:] = keys[:50]
    images = np.zeros((ROWS, SIDE, SIDE), np.uint8)
    images[:, 0] = generator.integers(0, 256, (ROWS, SIDE), np.uint8)
    table = pa.table({"key": keys, "x": generator.normal(5, 2, ROWS), "image": tensor_array(images)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=512)
    return bytes(sink.getvalue())


def assert_same_version(watched: Watched, undisturbed: DatasetVersion) -> None:
    done = watched.place.ended(watched.started)
    watched.place.assert_made_once(done, undisturbed.manifest_sha256)
    assert watched.done_again == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds",
    [
        ["attempt"],
        [*["worker"] * 4, "attempt", *["worker"] * 4, "node", *["worker"] * 4, "attempt", *["worker"] * 4, "node"],
    ],
    ids=["one", "twenty"],
)
def test_no_part_is_done_again_once_it_was_kept(
    s3_store: StoreSettings, gate: Gate, tmp_path: Path, faults: Faults, kinds: Sequence[str]
) -> None:
    left = list(kinds)
    with two_nodes(s3_store, tmp_path) as cluster:
        place = cluster.place
        source = place.imported(uploaded(place, images_stream())).name
        undisturbed = place.transformed(source, **judged())
        assert len(undisturbed.files) >= PARTS
        while left:
            before = len(left)
            with gate.slow():
                started = place.start_transform(source, **judged())
                watched = Watched(cluster, started, place.version_of(started))
                watched.wait_for_progress(PARTS // 2)
                strike_until_over(watched, left, faults)
            assert len(left) < before
            assert_same_version(watched, undisturbed)
