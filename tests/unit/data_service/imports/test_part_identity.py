"""Parts of an import are known again by another process and by the next attempt, unless their file changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle

from data_service.domain.import_spec import CsvOptions, Source
from data_service.formats import interface, open_sources
from data_service.imports import plan
from data_service.imports.plan import ImportPart, Placer, SourceRun, identity_of, plan_parts
from data_service.storage.source_files import SourceFiles
from shared.storage import ObjectStore, open_store
from tests.support.idx import digits, write_idx
from tests.support.images import encoded, tar_of
from tests.support.import_sources import opened, source_of
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of

KINDS = ["parquet", "arrow", "csv", "json_lines"]
TABLE = pa.table({"n": [1, 2, 3], "word": ["a", None, "c"]})


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "parquet":
            pq.write_table(TABLE, path)
        case "arrow":
            with pa.ipc.new_file(path, TABLE.schema) as writer:
                writer.write_table(TABLE)
        case "csv":
            path.write_text("n,word\n1,a\n2,\n3,c\n")
        case _:
            path.write_text('{"n": 1, "word": "a"}\n{"n": 2}\n')
    return path


def send(part: ImportPart) -> ImportPart:
    """The part, as another process has it."""
    sent: ImportPart = cloudpickle.loads(cloudpickle.dumps(part))  # type: ignore[no-untyped-call]
    return sent


def part_of(path: Path, uri: str, kind: str) -> ImportPart:
    """The part, as an attempt plans it that opens the source anew."""
    source = Source(split="train", format=kind, uris={f"{kind}.uri": uri})
    opened = open_sources([source], SourceFiles([PurePosixPath(path.parent)], None), {}, "")
    (part,) = plan_parts(["train"], None, opened).parts
    return part


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, f"rows.{kind}") for kind in KINDS] + [("parquet", "*.parquet"), ("csv", "*.csv")],
)
def test_a_part_is_the_same_for_another_attempt_and_in_another_process(tmp_path: Path, kind: str, name: str) -> None:
    path, uri = write(tmp_path, kind), f"{tmp_path.as_uri()}/{name}"
    part = part_of(path, uri, kind)
    sent = send(part)
    assert repr(part) == repr(part_of(path, uri, kind)) == repr(sent) == repr(send(sent))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_whose_file_was_written_again_is_another_one(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    before, size = repr(part_of(path, path.as_uri(), kind)), path.stat().st_size
    write(tmp_path, kind)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # within one tick of the disk's clock
    assert path.stat().st_size == size
    assert repr(part_of(path, path.as_uri(), kind)) != before


def write_all(folder: Path) -> None:
    """Write a source of each kind into the folder."""
    (folder / "day=1").mkdir()
    for kind in KINDS:
        write(folder / "day=1", kind)
    classes = [f"class-{number}" for number in range(12)]
    (folder / "images.tar").write_bytes(tar_of({f"{name}/a.png": encoded() for name in classes}))
    for name in classes:
        (folder / "images" / name).mkdir(parents=True)
        (folder / "images" / name / "a.png").write_bytes(encoded())
    images, labels = digits(30)
    write_idx(folder / "idx-images", images)
    write_idx(folder / "idx-labels", labels)


def identities(folder: Path) -> dict[str, str]:
    """The parts of the sources in the folder, with and without types of columns."""
    tables = {
        kind: Source(split="train", format=kind, uris={f"{kind}.uri": f"{folder.as_uri()}/**/*.{kind}"})
        for kind in KINDS
    }
    idx = {f"idx.{name}_uri": (folder / f"idx-{name}").as_uri() for name in ("images", "labels")}
    others = {
        "image_tar": Source(
            split="train", format="image_tar", uris={"image_tar.uri": (folder / "images.tar").as_uri()}
        ),
        "image_folder": Source(
            split="train", format="image_folder", uris={"image_folder.uri": f"{(folder / 'images').as_uri()}/"}
        ),
        "idx": Source(split="train", format="idx", uris=idx),
    }
    found = {}
    for types in ({}, {"n": "int16", "word": "binary", "day": "string"}, {"n": "string", "day": "int8"}):
        for kind, source in {**tables, **({} if types else others)}.items():
            opened = open_sources([source], SourceFiles([PurePosixPath(folder)], None), types)
            (part,) = plan_parts(["train"], None, opened).parts
            found[f"{kind} {types}"] = repr(part)
    return found


IN_ANOTHER_PROCESS = """
import json, sys
from pathlib import Path
from tests.unit.data_service.imports.test_part_identity import identities
print(json.dumps(identities(Path(sys.argv[1]))))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_part_is_the_same_in_a_process_that_hashes_texts_in_another_way(tmp_path: Path, seed: str) -> None:
    write_all(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[4],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(ran.stdout) == identities(tmp_path)


def part_of_upload(store: ObjectStore, name: str) -> ImportPart:
    """The part of a small CSV whose names and types are given, so that none of its bytes is read."""
    options = CsvOptions(column_names=["n"])
    source = Source(split="train", format="csv", uris={"csv.uri": name}, csv=options)
    opened = open_sources([source], SourceFiles([], None, store), {"n": "int64"}, "")
    (part,) = plan_parts(["train"], None, opened).parts
    return part


def test_a_part_is_the_same_after_the_keys_of_the_store_were_changed(store: ObjectStore) -> None:
    name = committed(uploads_of(store), b"1\n2\n")
    changed = open_store(replace(store.settings, s3_access_key="other", s3_secret_key="other"))
    assert repr(part_of_upload(changed, name)) == repr(part_of_upload(store, name))


def test_a_part_of_an_upload_that_was_sent_anew_is_another_one(store: ObjectStore) -> None:
    uploads = uploads_of(store)
    name = committed(uploads, b"1\n2\n")
    before = repr(part_of_upload(store, name))
    assert repr(part_of_upload(store, name)) == before
    uploads.abort(name)
    assert committed(uploads, b"3\n4\n") == name
    assert repr(part_of_upload(store, name)) != before


def test_a_part_is_digested_once_for_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(write(tmp_path, "csv"), f"{tmp_path.as_uri()}/rows.csv", "csv")
    digested = []

    def count(rows: object) -> str:
        digested.append(rows)
        return identity_of(rows)

    monkeypatch.setattr(plan, "identity_of", count)
    placed = [Placer({}, {}).place(part) for _ in range(3)]
    sent = [send(one) for one in placed]
    again = [Placer({}, {}).place(one) for one in sent]
    assert len({repr(one) for one in [*placed, *sent, *again]}) == 1
    assert [one for one in digested if isinstance(one, tuple)] == [part.runs]


def test_the_shared_schema_and_casts_of_parts_are_digested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    names = [f"c{index}" for index in range(50)]
    lines = [",".join(names), *[",".join([str(row)] * 50) for row in range(500)]]
    (tmp_path / "wide.csv").write_text("\n".join(lines) + "\n")
    (one,) = opened(tmp_path, source_of((tmp_path / "wide.csv").as_uri(), "csv"))
    runs = [(SourceRun(0, rows),) for rows in one.rows.parts()]
    digested: list[Any] = []
    members = plan._members_of

    def note(shared: Any) -> list[Any]:
        digested.append(shared)
        return members(shared)

    monkeypatch.setattr(plan, "_members_of", note)
    digests = [identity_of(one) for one in runs]
    assert len(set(digests)) == len(runs) > 20
    assert len(digested) <= 2 + 50  # the schema, the casts, and each of them
    assert [identity_of(one) for one in runs] == digests
