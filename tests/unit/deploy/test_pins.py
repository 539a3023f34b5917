"""The stack in containers runs what the tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("server", ["minio", "versitygw"])
def test_the_image_of_an_s3_server_has_the_version_that_tests_start(server: str) -> None:
    variable = f"{server.upper()}_VERSION"
    makefile = (REPOSITORY / "Makefile").read_text()
    dockerfile = (REPOSITORY / "deploy" / f"{server}.Dockerfile").read_text()
    tested = re.search(rf"^{variable} := (\S+)$", makefile, re.MULTILINE)
    built = re.search(rf"^ARG {variable}=(\S+)$", dockerfile, re.MULTILINE)
    assert tested is not None
    assert built is not None
    assert tested[1] == built[1]
