from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shared.dataset_version.manifest import Column, DataFile, Manifest, Split, sha256_hex
from shared.errors import DataLoss

MANIFEST = Manifest(
    columns=[Column(name="label", arrow_type="int64", shape=[])],
    splits=[Split(name="train", first_row_id=0, row_count=3)],
    files=[
        DataFile(
            path="train-00000.parquet",
            split="train",
            first_row_id=0,
            row_count=3,
            row_groups=[2, 1],
            size_bytes=100,
            sha256="ab",
            footer_bytes=10,
            footer_sha256="cd",
        )
    ],
)


def test_a_manifest_survives_the_store() -> None:
    data = MANIFEST.to_json()
    assert Manifest.from_json(data, sha256_hex(data)) == MANIFEST


def test_files_that_were_made_before_their_values_were_counted_have_the_digest_that_they_had() -> None:
    data = MANIFEST.to_json()
    assert b"raw_bytes" not in data
    counted = replace(MANIFEST, files=[replace(MANIFEST.files[0], raw_bytes=7)])
    reported = counted.to_json()
    assert Manifest.from_json(reported, sha256_hex(reported)) == counted
    assert json.loads(reported)["files"][0] == {**json.loads(data)["files"][0], "raw_bytes": 7}


def test_the_bytes_of_a_manifest_are_canonical() -> None:
    data = MANIFEST.to_json()
    record = json.loads(data)
    assert json.dumps(record, sort_keys=True, separators=(",", ":")).encode() == data
    assert (record["row_count"], record["size_bytes"]) == (3, 100)


def test_other_bytes_than_those_committed_are_refused() -> None:
    data = MANIFEST.to_json()
    with pytest.raises(DataLoss) as lost:
        Manifest.from_json(data.replace(b'"label"', b'"lapel"'), sha256_hex(data))
    assert lost.value.specific_reason == "MANIFEST_DIGEST"


def test_a_format_of_the_future_is_refused() -> None:
    data = MANIFEST.to_json().replace(b"dataset-version/2", b"dataset-version/4")
    with pytest.raises(DataLoss, match="dataset-version/4"):
        Manifest.from_json(data, sha256_hex(data))
