"""The checkpoint format: what comes back is what was written, or `DataLoss` that names the file."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoint import CheckpointContent, load_checkpoint, write_checkpoint
from shared.checkpoint.format import MANIFEST
from shared.errors import DataLoss, Unavailable
from shared.storage import ObjectStore
from shared.transforms import Pipeline
from tests.support.checkpoint_samples import FILES, content, write


def test_a_checkpoint_comes_back_as_it_was_written(store: ObjectStore) -> None:
    digest, size_bytes = write_checkpoint(store, "checkpoint", content(), FILES)

    read = load_checkpoint(store, "checkpoint", digest)

    assert read.content == content()
    assert {path: read.read(path) for path in FILES} == FILES
    read.verify()
    assert size_bytes == sum(info.size_bytes for info in store.list("checkpoint"))
    assert digest == hashlib.sha256(store.get(f"checkpoint/{MANIFEST}")).hexdigest()


def test_one_that_was_written_before_classes_had_names_has_none() -> None:
    named = content(class_names=("ants", "bees"))
    manifest = named.as_manifest()
    assert CheckpointContent.from_manifest(manifest) == named

    del manifest["class_names"]

    assert CheckpointContent.from_manifest(manifest).class_names == ()


def test_one_that_was_written_before_they_kept_statistics_says_nothing_of_nan() -> None:
    counted = content(nan_counts={"image": 0})
    manifest = counted.as_manifest()
    assert CheckpointContent.from_manifest(manifest) == counted

    del manifest["nan_counts"]

    assert CheckpointContent.from_manifest(manifest).nan_counts is None


def test_the_served_pipeline_is_the_trained_one(store: ObjectStore) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)

    served = load_checkpoint(store, "checkpoint", write(store)).content.serving()

    trained = Pipeline.from_config(content().transforms[0])
    assert served({"image": rows})["image"].tobytes() == trained({"image": rows})["image"].tobytes()


def test_equal_checkpoints_have_equal_digests(store: ObjectStore) -> None:
    assert write(store, "one") == write(store, "other")
    other_order = dict(reversed(FILES.items()))
    assert write_checkpoint(store, "third", content(), other_order)[0] == write(store, "one")


def test_the_manifest_is_written_last(store: ObjectStore) -> None:
    class Dying(ObjectStore):
        def __init__(self) -> None:
            self.__dict__.update(vars(store))
            self.written: list[str] = []

        def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
            self.written.append(key)
            if len(self.written) == len(FILES) + 1:
                raise Unavailable("the object store does not answer")
            super().put(key, data)

    dying = Dying()
    with pytest.raises(Unavailable):
        write(dying)

    assert dying.written[-1] == f"checkpoint/{MANIFEST}"
    with pytest.raises(DataLoss, match=r"manifest\.json is missing"):
        load_checkpoint(store, "checkpoint", "0" * 64)


@pytest.mark.parametrize("path", FILES)
@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_data_loss_that_names_the_file(
    store: ObjectStore, path: str, position: int, flip: int
) -> None:
    digest = write(store)
    damaged = bytearray(FILES[path])
    damaged[position % len(damaged)] ^= flip
    store.put(f"checkpoint/{path}", damaged)

    read = load_checkpoint(store, "checkpoint", digest)

    with pytest.raises(DataLoss, match=f"checkpoint/{path}") as lost:
        read.read(path)
    assert lost.value.metadata == {"file": f"checkpoint/{path}"}
    with pytest.raises(DataLoss):
        read.verify()


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "missing"])
def test_a_file_of_another_length_or_none_is_data_loss(store: ObjectStore, path: str, damage: str) -> None:
    digest = write(store)
    key = f"checkpoint/{path}"
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, {"truncated": FILES[path][:-1], "longer": FILES[path] + b"x", "empty": b""}[damage])

    with pytest.raises(DataLoss, match=path):
        load_checkpoint(store, "checkpoint", digest).verify()


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json", b"\xff\xfe"], ids=repr)
def test_another_manifest_is_never_read(store: ObjectStore, damage: bytes) -> None:
    digest = write(store)
    store.put(f"checkpoint/{MANIFEST}", damage)

    with pytest.raises(DataLoss, match=MANIFEST):
        load_checkpoint(store, "checkpoint", digest)


def test_a_manifest_of_another_release_is_refused_by_its_format(store: ObjectStore) -> None:
    write(store)
    later = json.loads(store.get(f"checkpoint/{MANIFEST}"))
    encoded = json.dumps({**later, "format": "millrace.checkpoint/4", "model": {"graph": "…"}}).encode()
    store.put(f"checkpoint/{MANIFEST}", encoded)

    with pytest.raises(DataLoss, match=r"millrace\.checkpoint/4"):
        load_checkpoint(store, "checkpoint", hashlib.sha256(encoded).hexdigest())


def test_a_file_that_the_manifest_does_not_name_is_data_loss(store: ObjectStore) -> None:
    digest = write_checkpoint(store, "checkpoint", content(), {"model.safetensors": b"w"})[0]

    with pytest.raises(DataLoss, match=r"optimizer\.safetensors"):
        load_checkpoint(store, "checkpoint", digest).read("optimizer.safetensors")


def test_a_missing_metric_is_kept_apart_from_none(store: ObjectStore) -> None:
    digest = write_checkpoint(store, "checkpoint", content(metrics={}), FILES)[0]

    assert load_checkpoint(store, "checkpoint", digest).content.metrics == {}
