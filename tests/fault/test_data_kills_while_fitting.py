"""SIGKILL while a transform learns, finds keys and counts, before anything is written: the result is the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from google.longrunning import operations_pb2

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import quality_pb2
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace_client import hash_split, steps
from shared.dataset_version.manifest import tensor_array
from tests.support import custom_functions
from tests.support.data_strikes import Struck, cases, strike, uploaded
from tests.support.waiting import wait_until

ROWS, REPEATED = 8_000, 50
# The phase FITTING is three passes over all rows; its total grows by them as a pass begins.
PASSES = {"learning": 1, "finding keys": 2, "counting": 3}
Metadata = pb.TransformVersionMetadata


@dataclass
class Scene(Struck):
    source: str = ""

    @cached_property
    def wanted(self) -> DatasetVersion:
        """What an undisturbed transform makes of the source."""
        return self.place.transformed(self.source, **judged())


def scene_of(struck: Struck) -> Scene:
    source = struck.place.imported(uploaded(struck.place, readings_stream()))
    return Scene(struck.place, struck.gate, struck.store, struck.s3, source=source.name)


def readings_stream() -> bytes:
    """Keys of which the last `REPEATED` stand at the beginning, too, in another part; numbers; and images, for which a
    transform of so few rows has several parts."""
    generator = np.random.default_rng(3)
    keys = np.arange(ROWS)
    keys[-REPEATED:] = keys[:REPEATED]
    table = pa.table(
        {
            "key": keys,
            "x": generator.normal(5, 2, ROWS),
            "image": tensor_array(generator.integers(0, 256, (ROWS, 28, 28), np.uint8)),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=512)
    return bytes(sink.getvalue())


def judged() -> dict[str, Any]:
    """A pipeline that learns, drops rows, splits, and leaves out those that checks meet, one of them of uniqueness."""
    chain = [
        steps.custom(f"{custom_functions.MODULE}:slow", ["x", "key"], timeout_s=120),
        steps.filter_rows("key % 7 != 3"),
        steps.standardize("x"),
        steps.to_float("image"),
    ]
    quarantine = quality_pb2.QualityCheck.ACTION_QUARANTINE
    return {
        "transform": transform_pb2.Transform(steps=chain),
        "splits": hash_split(["key"], {"train": 0.8, "test": 0.2}, seed=5),
        "checks": [
            quality_pb2.QualityCheck(column="key", action=quarantine, unique=quality_pb2.Unique()),
            quality_pb2.QualityCheck(column="x", action=quarantine, range=quality_pb2.Range(min=-3, max=3)),
        ],
    }


def progress(scene: Scene, started: operations_pb2.Operation) -> Metadata:
    metadata = Metadata()
    assert scene.place.operation(started.name).metadata.Unpack(metadata)
    return metadata


@cases(
    dict.fromkeys(PASSES, "service actor worker s3"),
    quick=[],
)
def test_a_transform_struck_before_it_writes_finishes_once(scene: Scene, stage: str, victim: str) -> None:
    place, wanted = scene.place, scene.wanted
    assert len(wanted.files) > 2
    assert wanted.quarantined_row_count > REPEATED
    place.at_rest()
    with scene.gate.slow():
        started = place.start_transform(scene.source, **judged())
        version = place.version_of(started)
        wait_until(
            lambda: progress(scene, started).rows_total == PASSES[stage] * ROWS and bool(place.workers()), stage, 120
        )
        before = progress(scene, started)
        recover = strike(scene, victim, f"transform, {stage}")
        assert (before.phase, before.rows_total) == (Metadata.PHASE_FITTING, PASSES[stage] * ROWS)
        assert before.rows_done < before.rows_total
        assert place.files_of(version) == 0, "nothing is written before all is known"
    recover()
    place.assert_invisible(version)
    done = place.ended(started)
    made = place.assert_made_once(done, wanted.manifest_sha256)
    assert made.transform == wanted.transform, "the same was learnt"
    attempts = {"actor": (2,), "s3": (1, 2)}.get(victim, (1,))
    ended = Metadata()
    assert done.metadata.Unpack(ended)
    assert ended.attempt in attempts
