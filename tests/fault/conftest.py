"""One Ray head for all fault tests of the data service that leave it alive, and the gate that its workers know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.data_place import Gate
from tests.support.ray_head import NONE_WARM, RayHead, ray_head


@pytest.fixture(scope="package")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="package")
def data_head(gate: Gate) -> Iterator[RayHead]:
    """Its workers inherit where the gate is."""
    assert gate
    with ray_head(num_cpus=4, environ=NONE_WARM) as head:
        yield head
