"""What the protos and the pins promise: every generated module imports, and one release of MinIO serves all."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(
    proto.relative_to(ROOT / "protos").with_suffix("")
    for proto in (ROOT / "protos").rglob("*.proto")
    if "gen" not in proto.relative_to(ROOT / "protos").parts
)


@pytest.mark.parametrize("proto", PROTOS, ids=str)
@pytest.mark.parametrize("suffix", ["_pb2", "_pb2_grpc"])
def test_generated_module_is_importable_under_the_name_of_its_proto_package(proto: Path, suffix: str) -> None:
    module = importlib.import_module(".".join(proto.parts) + suffix)

    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT / "protos" / "gen")


def test_the_stack_and_the_tests_run_the_same_release_of_minio() -> None:
    built_by = {
        path: re.findall(r"MINIO_VERSION *:?= *(\S+)", (ROOT / path).read_text())
        for path in ("Makefile", "deploy/minio.Dockerfile")
    }

    assert built_by["Makefile"] == built_by["deploy/minio.Dockerfile"]
    assert len(built_by["Makefile"]) == 1
