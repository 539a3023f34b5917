"""Which S3 server tests run against, and when its absence is a failure."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.s3_server import NoS3Server, find_program, name_under_test


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"MILLRACE_CACHE": str(tmp_path)}


def install(environ: dict[str, str], name: str) -> Path:
    program = Path(environ["MILLRACE_CACHE"], "bin", name)
    program.parent.mkdir(exist_ok=True)
    program.touch()
    program.chmod(stat.S_IRWXU)
    return program


def test_minio_is_taken_before_versitygw(environ: dict[str, str]) -> None:
    install(environ, "versitygw")
    minio = install(environ, "minio")
    assert find_program(environ).path == minio


def test_minio_given_by_its_path_is_taken(environ: dict[str, str]) -> None:
    given = install(environ, "minio").rename(Path(environ["MILLRACE_CACHE"], "my-minio"))
    program = find_program({**environ, "MILLRACE_MINIO": str(given)})
    assert (program.name, program.path) == ("minio", given)


def test_versitygw_stands_in_where_minio_is_not_demanded(environ: dict[str, str]) -> None:
    install(environ, "versitygw")
    assert find_program({**environ, "MILLRACE_REQUIRE_S3": "1"}).name == "versitygw"


def test_versitygw_is_not_accepted_where_minio_is_demanded(environ: dict[str, str]) -> None:
    install(environ, "versitygw")
    with pytest.raises(NoS3Server, match="make minio") as absent:
        find_program({**environ, "MILLRACE_REQUIRE_MINIO": "1"})
    assert absent.value.required


@pytest.mark.parametrize(
    ("demands", "required"), [({}, False), ({"MILLRACE_REQUIRE_S3": "0"}, False), ({"MILLRACE_REQUIRE_S3": "1"}, True)]
)
def test_no_server_at_all_fails_only_where_one_is_demanded(
    environ: dict[str, str], demands: dict[str, str], required: bool
) -> None:
    with pytest.raises(NoS3Server, match="make s3") as absent:
        find_program({**environ, **demands})
    assert absent.value.required is required


def test_a_missing_server_is_named_minio(environ: dict[str, str]) -> None:
    assert name_under_test({**environ, "MILLRACE_REQUIRE_MINIO": "1"}) == "minio"
