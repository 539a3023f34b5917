"""One Ray head for all fault tests of the data service that leave it alive, and the gate that its workers know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.data_place import Gate
from tests.support.ray_head import RayHead, ray_head
from tests.support.s3_server import NoS3Server, S3Program, find_program


@pytest.fixture(scope="session")
def s3_program() -> S3Program:
    """As `s3_server` of all suites: fails or skips without one."""
    try:
        return find_program()
    except NoS3Server as absent:
        if absent.required:
            pytest.fail(str(absent), pytrace=False)
        pytest.skip(str(absent))


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="session")
def data_head(gate: Gate) -> Iterator[RayHead]:
    """Its workers inherit where the gate is."""
    assert gate
    with ray_head(num_cpus=4) as head:
        yield head
