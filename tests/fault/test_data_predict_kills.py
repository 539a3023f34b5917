"""SIGKILL to each that takes part in a prediction over a version: it is done in the end, once, and with the undisturbed
run's digest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from tests.integration.data_service.client import imported
from tests.support.data_place import DataPlace, data_place
from tests.support.faults import Faults
from tests.support.predicting import CHECKPOINT, images, write
from tests.support.ray_head import RayHead
from tests.support.transforming import SOURCE, commit_tables
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ROWS = 8_000
TIMEOUT_S = 300.0
# Ray Data's actors while they have a part.
WORKER = "ray::MapWorker(FlatMap(PoolWorker)).submit"
STEPS = [
    {"column": "image", "toFloat": {}},
    {"column": "image", "normalize": {"mean": [0.1307], "std": [0.3081]}},
]


@pytest.fixture(scope="module")
def place(data_head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlace]:
    """With images, and a ResNet-18 that takes seconds over a part of them."""
    folder = tmp_path_factory.mktemp("predictions")
    with data_place(StoreSettings(url=(folder / "store").as_uri()), data_head, folder / "data") as place:
        table = images(ROWS)
        commit_tables(place.store, {"train": table.slice(0, ROWS - 2000), "test": table.slice(ROWS - 2000)})
        model = ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10)
        write(
            place.store,
            ingested=table.schema,
            transforms=[{"steps": STEPS}],
            input_column="image",
            model=model,
            class_names=[f"class {number}" for number in range(10)],
        )
        yield place


def test_a_prediction_outlives_its_worker_its_attempt_and_its_service(place: DataPlace, faults: Faults) -> None:
    undisturbed = imported(place.ended(place.start_prediction(SOURCE, CHECKPOINT), TIMEOUT_S))
    assert len(undisturbed.files) > 6, "several parts"

    started = place.start_prediction(SOURCE, CHECKPOINT)
    version = place.version_of(started)

    def half_way(attempt: int, files: int) -> None:
        """Wait until that attempt has written that number of files, and is at work on another."""
        wait_until(lambda: _files_of(place, version, attempt) >= files, f"attempt {attempt} to write", TIMEOUT_S)
        place.assert_invisible(version)

    half_way(1, 2)
    place.strike_pids(place.head.processes(WORKER)[:1])
    half_way(1, 3)
    place.strike_pids(place.at_work())
    half_way(2, 2)
    place.strike_service()
    place.service.start()

    done = place.ended(started, TIMEOUT_S)
    made = place.assert_made_once(done, undisturbed.manifest_sha256)
    assert place.struck == 3
    faults.add("SIGKILL Ray worker, attempt, service", "prediction", "file", place.struck)
    assert made.prediction == undisturbed.prediction
    assert [split.row_count for split in made.splits] == [ROWS - 2000, 2000]


def _files_of(place: DataPlace, version: str, attempt: int) -> int:
    prefix = f"{version}/data/a{attempt:05d}-"
    return sum(
        info.key.startswith(prefix) and info.key.endswith(".parquet") for info in place.store.list(f"{version}/data")
    )
