"""SIGKILL to the attempt while a transform works on two nodes: no part is done again once it was kept."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from google.longrunning import operations_pb2

from data_service.kept_parts import header_of
from millrace.data.v1.resources_pb2 import DatasetVersion
from shared.dataset_version.manifest import tensor_array
from shared.settings import StoreSettings
from shared.storage import ObjectMissing
from tests.fault.test_data_kills_while_fitting import judged
from tests.support.data_place import AT_WORK, DataPlace, Gate, data_place
from tests.support.data_strikes import uploaded
from tests.support.faults import Faults
from tests.support.ray_head import NONE_WARM, RayNode, ray_head, ray_node
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

# Images whose floats are 16 KiB a row: 16 parts of some 500 rows, in each of four passes.
ROWS, SIDE = 8_192, 64
PARTS = 16
STRIKE_TIMEOUT_S = 300.0
RECORD = re.compile(r"/data/(?P<attempt>[^/]+)/kept/(?P<part>.+)")


@dataclass
class Cluster:
    """A head that computes nothing, and nodes of one CPU each."""

    place: DataPlace
    nodes: list[tuple[RayNode, ExitStack]] = field(default_factory=list)
    started: int = 0

    def add_node(self) -> None:
        stack, self.started = ExitStack(), self.started + 1
        self.nodes.append((stack.enter_context(ray_node(self.place.head, f"node-{self.started}")), stack))

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
    _read: set[str] = field(default_factory=set)

    @property
    def place(self) -> DataPlace:
        return self.cluster.place

    @property
    def attempt(self) -> str:
        """The newest attempt's folder; empty before the first."""
        return max(self.place.store.folders(f"{self.version}/data"), default="")

    def is_over(self) -> bool:
        """Looks at the newest attempt's records meanwhile. A lost attempt may still be adding to its own."""
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


def strike_attempt(watched: Watched) -> None:
    attempt = watched.attempt
    for pid in watched.cluster.processes(AT_WORK):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: watched.is_over() or watched.attempt > attempt, "the next attempt", STRIKE_TIMEOUT_S, 0.1)


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
def test_no_part_is_done_again_once_it_was_kept(
    s3_store: StoreSettings, gate: Gate, tmp_path: Path, faults: Faults
) -> None:
    with two_nodes(s3_store, tmp_path) as cluster:
        place = cluster.place
        source = place.imported(uploaded(place, images_stream())).name
        undisturbed = place.transformed(source, **judged())
        assert len(undisturbed.files) >= PARTS
        with gate.slow():
            started = place.start_transform(source, **judged())
            watched = Watched(cluster, started, place.version_of(started))
            watched.wait_for_progress(PARTS // 2)
            strike_attempt(watched)
            faults.add("SIGKILL attempt", "transform, parts kept", "S3")
            wait_until(watched.is_over, "the transform", 2 * STRIKE_TIMEOUT_S, 0.1)
        assert_same_version(watched, undisturbed)
