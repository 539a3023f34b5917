"""Files made to harm: each import of one FAILS without another try, with a documented status, in little memory."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import pytest

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from tests.integration.data_service.client import DataClient, metadata_of, parquet
from tests.integration.data_service.conftest import DataStack
from tests.support import hostile_files
from tests.support.images import encoded
from tests.support.peak_memory import MEBIBYTE, peaks_of
from tests.support.ray_head import RayHead
from tests.support.refusals import Refusal, refusal_of
from tests.support.stores import S3_IN_CHAOS

# Where the sources are, too.
pytestmark = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)

# The process of an attempt has 200 MiB before it begins.
MAX_BYTES = 512 * MEBIBYTE

# What the operation fails with: reason, and what its message says of the source.
CASES = {
    "Parquet bomb": ("CORRUPT_SOURCE", "of its rows decode to"),
    "gzip bomb": ("CORRUPT_SOURCE", "200 times its size"),
    "million columns": ("CORRUPT_SOURCE", "it has 1000000 columns; at most 10000 are read"),
    "ragged CSV": ("BAD_ROW", "line 3: it has 3 fields where 2 are named"),
    "Latin-1 as UTF-8": ("BAD_ROW", "line 3: column 'a' has bytes that are no text in its encoding"),
    "UTF-8 as UTF-16": ("CORRUPT_SOURCE", "it has no byte-order mark"),
    "no image": ("BAD_ROW", "file ants/b.jpg: it is no image of the formats JPEG"),
    "hundred megapixels": ("BAD_ROW", "fewer than 100,000,000"),
    "tar member with ..": ("CORRUPT_SOURCE", "member 'ants/../../../x.png' has '..' in its path"),
    "tar member is a link": ("CORRUPT_SOURCE", "member 'ants/x.png' is a symbolic link"),
}


def hostile_sources(stack: DataStack) -> Mapping[str, pb.ImportSource]:
    def csv(data: bytes, name: str, encoding: str = "") -> pb.ImportSource:
        return pb.ImportSource(split="train", csv=pb.CsvSource(uri=stack.put_source(name, data), encoding=encoding))

    def tar(data: bytes, name: str) -> pb.ImportSource:
        return pb.ImportSource(split="train", image_tar=pb.ImageTarSource(uri=stack.put_source(name, data)))

    def images(name: str, files: Mapping[str, bytes]) -> pb.ImportSource:
        for path, data in files.items():
            uri = stack.put_source(f"{name}/{path}", data).removesuffix(path)
        return pb.ImportSource(split="train", image_folder=pb.ImageFolderSource(uri=uri))

    good = encoded()
    return {
        "Parquet bomb": parquet("train", stack.put_source("hostile.parquet", hostile_files.parquet_bomb())),
        "gzip bomb": tar(hostile_files.gzip_bomb(), "hostile-bomb.tar.gz"),
        "million columns": csv(hostile_files.many_columns(), "hostile-wide.csv"),
        "ragged CSV": csv(b"a,b\n1,2\n3,4,5\n", "hostile-ragged.csv"),
        "Latin-1 as UTF-8": csv("a,b\nx,1\ncafé,2\n".encode("latin-1"), "hostile-latin.csv"),
        "UTF-8 as UTF-16": csv(b"a,b\n1,2\n", "hostile-16.csv", encoding="utf-16"),
        "no image": images("hostile-text", {"ants/a.png": good, "ants/b.jpg": b"not an image"}),
        "hundred megapixels": images("hostile-pixels", {"ants/a.png": hostile_files.many_pixels()}),
        "tar member with ..": tar(hostile_files.tar_with("ants/../../../x.png"), "hostile-way.tar"),
        "tar member is a link": tar(hostile_files.tar_with("ants/x.png", tarfile.SYMTYPE), "hostile-link.tar"),
    }


@dataclass(frozen=True)
class Failed:
    version: str
    refusal: Refusal
    # Of each record of the job's log that has one, in their order.
    reasons: list[str]


@dataclass(frozen=True)
class Attacked:
    failed: Mapping[str, Failed]
    # By process id, in bytes.
    attempts: Mapping[int, int]
    service: Mapping[int, int]


@pytest.fixture(scope="module")
def attacked(stack: DataStack, data_ray: RayHead) -> Attacked:
    """By every case, side by side: one after the other each would take seconds."""
    parent, client = stack.new_dataset(), stack.client
    sources = hostile_sources(stack)
    with (
        peaks_of(lambda: data_ray.processes("ray::AttemptActor.run")) as attempts,
        peaks_of(lambda: [stack.service.pid]) as service,
    ):
        started = {
            case: client.data.ImportVersion(pb.ImportVersionRequest(parent=parent, sources=[source]), timeout=60)
            for case, source in sources.items()
        }
        done = {case: client.wait(operation) for case, operation in started.items()}
    failed = {}
    for case, operation in done.items():
        version = metadata_of(operation).version
        failed[case] = Failed(version, refusal_of(operation.error), reasons_in_log(stack, version))
    return Attacked(failed, attempts, service)


def reasons_in_log(stack: DataStack, version: str) -> list[str]:
    records = [json.loads(stack.store.get(info.key)) for info in stack.store.list(f"{version}/log")]
    records.sort(key=lambda record: int(record["number"]))
    return [record["state"]["error"]["reason"] for record in records if record["state"].get("error")]


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_source_fails_its_import_at_once_and_says_why(
    client: DataClient, stack: DataStack, attacked: Attacked, case: str
) -> None:
    reason, said = CASES[case]
    found = attacked.failed[case]
    assert (found.refusal.code, found.refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert said in found.refusal.message
    # Another attempt would find the same. One whose process is lost, as on a machine that is too busy, found nothing.
    assert [one for one in found.reasons if one != "ATTEMPT_LOST"] == [reason]
    version = client.data.GetVersion(pb.GetVersionRequest(name=found.version), timeout=60)
    assert version.state == DatasetVersion.STATE_FAILED
    assert refusal_of(version.error) == found.refusal
    assert list(stack.store.list(f"{found.version}/data")) == []


def test_hostile_sources_take_little_memory(attacked: Attacked) -> None:
    assert attacked.attempts
    assert max(attacked.attempts.values()) < MAX_BYTES
    assert max(attacked.service.values()) < MAX_BYTES
