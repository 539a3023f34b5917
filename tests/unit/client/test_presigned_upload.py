"""An upload by URLs whose parts are others when new URLs are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.data.v1 import resources_pb2
from millrace_client.errors import FailedPrecondition
from millrace_client.uploads import _SendingParts
from tests.support.ports import free_ports

NAME = "datasets/d/uploads/u"


def started(url: str, *sizes: int) -> resources_pb2.Upload:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [
        resources_pb2.PresignedPart(offset=offset, size_bytes=size, url=url)
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    return resources_pb2.Upload(name=NAME, presigned_parts=parts)


def test_an_upload_that_was_committed_meanwhile_takes_no_more_parts(tmp_path: Path) -> None:
    (tmp_path / "rows.bin").write_bytes(b"x" * 8)
    (nobody,) = free_ports(1)
    committed = resources_pb2.Upload(name=NAME, state=resources_pb2.Upload.STATE_COMMITTED)
    answers = iter([started(f"http://127.0.0.1:{nobody}/", 8), committed])
    with (tmp_path / "rows.bin").open("rb", buffering=0) as file:
        sending = _SendingParts(file.fileno(), lambda: next(answers))
        with pytest.raises(FailedPrecondition, match="committed meanwhile") as raised:
            sending.run(None)
    assert raised.value.reason == "UPLOAD_NOT_OPEN"


@pytest.mark.parametrize("others", [(6, 6), (4, 4, 4), (12,)], ids=str)
def test_parts_that_are_cut_otherwise_are_not_mixed_with_those_that_were_sent(
    tmp_path: Path, others: tuple[int, ...]
) -> None:
    (tmp_path / "rows.bin").write_bytes(b"x" * 12)
    (nobody,) = free_ports(1)
    url = f"http://127.0.0.1:{nobody}/"
    answers = iter([started(url, 8, 4)] + [started(url, *others)] * 10)
    with (tmp_path / "rows.bin").open("rb", buffering=0) as file:
        sending = _SendingParts(file.fileno(), lambda: next(answers))
        with pytest.raises(FailedPrecondition, match=NAME) as raised:
            sending.run(None)
    assert raised.value.reason == "PARTS_CHANGED"
    assert raised.value.metadata["resource"] == NAME
    assert f"abort_upload({NAME!r})" in raised.value.remedy
