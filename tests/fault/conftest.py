"""One Ray head for all fault tests of the data service that leave it alive, and places on both stores to strike."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.data_place import Gate, data_place
from tests.support.data_strikes import Struck
from tests.support.faults import Faults
from tests.support.killable_s3 import killable_s3
from tests.support.ray_head import NONE_WARM, RayHead, ray_head
from tests.support.s3_server import S3Program


@pytest.fixture
def faults(record_property: Callable[[str, object], None]) -> Faults:
    """What a test strikes, for the table at the end."""
    return Faults(record_property)


@pytest.fixture(scope="package")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="package")
def data_head(gate: Gate) -> Iterator[RayHead]:
    """Its workers inherit where the gate is."""
    assert gate
    with ray_head(num_cpus=4, environ=NONE_WARM, dashboard=False) as head:
        yield head


@pytest.fixture(scope="module")
def scenes() -> dict[str, Struck]:
    """Those of one file's tests, by the kind of store."""
    return {}


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: dict[str, Struck], faults: Faults) -> Iterator[Struck]:
    """What the test file's own `scene_of` makes of a place on the kind of store that the parameter names."""
    store = request.param
    if store not in scenes:
        scenes[store] = request.module.scene_of(request.getfixturevalue(f"struck_on_{store}"))
    with scenes[store].counted_in(faults):
        yield scenes[store]


@pytest.fixture(scope="module")
def struck_on_file(gate: Gate, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    folder = tmp_path_factory.mktemp("kills")
    with data_place(StoreSettings(url=(folder / "store").as_uri()), data_head, folder / "data") as place:
        yield Struck(place, gate, "file")


@pytest.fixture(scope="module")
def struck_on_s3(
    s3_program: S3Program, gate: Gate, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Struck]:
    """With an S3 server of its own, which can be killed."""
    folder = tmp_path_factory.mktemp("kills")
    with killable_s3(s3_program, folder / "s3") as s3:
        settings = s3.settings(f"s3://millrace/{uuid.uuid4().hex}")
        ensure_bucket(settings)
        with data_place(settings, data_head, folder / "data") as place:
            yield Struck(place, gate, "s3", s3)
