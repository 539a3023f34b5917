"""The replica's own code, without Ray around it: what it loads, what it refuses, and what enters the model."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from inference_service.domain.signature import PREPARED, RAW, Rows
from inference_service.serve.replica import Loaded, ModelReplica, ReplicaSpec
from inference_service.serve.served_model import ServedModel
from inference_service.serve.sockets import LocalReplicas
from shared.checkpoint import load_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.errors import DataLoss, FailedPrecondition
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.integration.inference_service.checkpoints import MODEL, Written, make_module, write
from tests.support.checkpoint_samples import stored_checkpoint
from tests.support.versions import columns_of

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
RAW_ROWS = Rows(RAW, {"image": IMAGES})


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


def replica(settings: StoreSettings, written: Written, sockets: Path | None = None) -> ModelReplica:
    return ModelReplica(
        ReplicaSpec(
            store=settings,
            folder=written.entry.folder,
            manifest_sha256=written.entry.manifest_sha256,
            threads=1,
            max_batch_size=4,
        ),
        sockets,
    )


def describe(one: ModelReplica) -> Loaded:
    return asyncio.run(one.describe())


def test_the_tensor_that_enters_the_model_is_bit_for_bit_that_of_the_transform(store: ObjectStore) -> None:
    written = write(store)
    checkpoint = load_checkpoint(store, written.entry.folder, written.entry.manifest_sha256)
    model = ServedModel(checkpoint)
    entered: list[torch.Tensor] = []
    model.module.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0].clone()))
    model.forward(RAW_ROWS)
    expected = written.content.serving()({"image": IMAGES})["image"]
    assert entered[0].dtype == torch.float32
    assert entered[0].numpy().tobytes() == expected.tobytes()


def test_a_loaded_replica_knows_its_signature_its_data_and_the_time_of_each_batch_size(
    store: ObjectStore, file_store: StoreSettings
) -> None:
    one = replica(file_store, write(store))
    loaded = describe(one)
    assert [(spec.name, str(spec)) for spec in loaded.signature.raw] == [("image", "UINT8 [-1, 28, 28]")]
    assert str(loaded.signature.prepared) == "FP32 [-1, 1, 28, 28]"
    assert loaded.dataset_version == "datasets/digits/versions/v1"
    assert sorted(loaded.batch_s) == [1, 2, 4]
    logits, probabilities, label = asyncio.run(one.forward(RAW_ROWS)).arrays
    assert (logits.shape, probabilities.shape, label.shape) == ((5, 10), (5, 10), (5,))
    assert [array.dtype.name for array in (logits, probabilities, label)] == ["float32", "float32", "int64"]


def test_encoded_images_are_decoded_by_the_model_and_a_bad_one_harms_no_other(
    store: ObjectStore, tmp_path: Path
) -> None:
    steps: list[dict[str, Any]] = [
        {"decodeImage": {"mode": "MODE_GRAY"}},
        {"resize": {"height": 28, "width": 28}},
        {"toFloat": {}},
    ]
    of_photos = replace(
        write(store).content,
        ingested=columns_of(pa.schema([("photo", pa.binary())])),
        transforms=[{"steps": [{"column": "photo", **step} for step in steps]}],
        input_column="photo",
    )
    model = ServedModel(stored_checkpoint(tmp_path / "photos", of_photos, save(make_module().state_dict())))
    assert sorted(model.warm_up(2)) == [1, 2]
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, "PNG")

    outputs = model.forward(Rows(RAW, {"photo": np.array([b"no image", file.getvalue()], object)}))

    pixels = IMAGES[:1, None].astype(np.float32) / np.float32(255)
    expected = model.forward(Rows(PREPARED, {"photo": pixels}))
    assert [*outputs.refused] == [0]
    np.testing.assert_allclose(outputs.arrays[0][1], expected.arrays[0][0], rtol=0, atol=1e-6)


def test_rows_in_memory_that_may_not_be_written_are_served(store: ObjectStore, file_store: StoreSettings) -> None:
    prepared = np.zeros((1, 1, 28, 28), np.float32)
    prepared.flags.writeable = False
    assert asyncio.run(replica(file_store, write(store)).forward(Rows(PREPARED, {"image": prepared})))


@pytest.mark.parametrize("file", [WEIGHTS, "manifest.json"])
def test_a_file_that_is_damaged_or_missing_is_data_loss(
    store: ObjectStore, file_store: StoreSettings, file: str
) -> None:
    written = write(store, weights=b"some weights")
    key = f"{written.entry.folder}/{file}"
    store.put(key, store.get(key)[:-1] + b"?")
    with pytest.raises(DataLoss, match="digest"):
        describe(replica(file_store, written))
    store.delete(key)
    one = replica(file_store, written)
    with pytest.raises(DataLoss, match="missing"):
        describe(one)
    with pytest.raises(DataLoss, match="missing"):
        asyncio.run(one.forward(RAW_ROWS))


def test_weights_that_are_no_weights_or_of_another_model_do_not_load(
    store: ObjectStore, file_store: StoreSettings
) -> None:
    state = dict(make_module().state_dict())
    state["fc.bias"] = torch.zeros(11)
    for name, weights in (("c1", b"no weights"), ("c2", save(state)), ("c3", save({"x": torch.zeros(1)}))):
        with pytest.raises(FailedPrecondition, match="does not load"):
            describe(replica(file_store, write(store, name, weights=weights)))


def test_a_builder_that_is_unknown_does_not_load(store: ObjectStore, tmp_path: Path) -> None:
    written = write(store)
    strange = replace(written.content, model=replace(MODEL, builder="torchvision.resnet17"))
    with pytest.raises(FailedPrecondition, match="resnet17"):
        ServedModel(stored_checkpoint(tmp_path / "strange", strange, save(make_module().state_dict())))


async def test_a_replica_answers_over_its_socket_until_serve_stops_it(
    store: ObjectStore, file_store: StoreSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "p" / "s"  # the path of a Unix socket has at most 107 bytes
    one = replica(file_store, write(store), folder)
    assert (await one.describe()).sockets == folder

    local = LocalReplicas(folder)
    socket_server = await local.least_loaded()
    assert socket_server is not None
    assert len((await socket_server.forward(RAW_ROWS)).arrays[0]) == len(IMAGES)
    await asyncio.to_thread(one.__del__)  # as Serve does
    assert await local.least_loaded() is None
    assert not folder.exists()
