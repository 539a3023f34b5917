"""The real tables and images of ../shared/data: imported, transformed and read back exactly."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from google.protobuf import json_format
from PIL import Image

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace_client import hash_split, steps
from millrace_client.cli import millrace
from tests.integration.data_service.client import DataClient, imported
from tests.integration.data_service.conftest import DataStack
from tests.support.real_data import real_data
from tests.support.stores import FILES_IN_CHAOS, S3_IN_CHAOS

# The sources are local files whatever the store. One test makes a version ready for training on S3.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)
ON_FILES_IN_CHAOS = pytest.mark.parametrize("stack", FILES_IN_CHAOS, indirect=True)


def transformed(client: DataClient, source: str, **values: Any) -> DatasetVersion:
    parent = source.rsplit("/versions/", 1)[0]
    request = pb.TransformVersionRequest(parent=parent, source=source, **values)
    return imported(client.wait(client.data.TransformVersion(request, timeout=60)))


def tabular(stack: DataStack, dataset: str, name: str) -> tuple[DatasetVersion, list[dict[str, str]]]:
    """The imported version, and the rows as Python's own reader has them."""
    path = stack.inputs / name
    shutil.copyfile(real_data() / "tabular" / name, path)
    source = pb.ImportSource(split="all", csv=pb.CsvSource(uri=path.as_uri()))
    version = stack.client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[source]))
    with path.open(newline="") as file:
        return version, list(csv.DictReader(file))


@ON_S3_IN_CHAOS
def test_the_penguins_come_back_value_by_value(stack: DataStack, client: DataClient, dataset: str) -> None:
    version, rows = tabular(stack, dataset, "penguins.csv")

    table = client.read(version.name)

    assert table.num_rows == len(rows) == 344
    for field in table.schema:
        read = table.column(field.name).to_pylist()
        given = [None if row[field.name] in ("", "NA") else row[field.name] for row in rows]
        wanted = [one if one is None or pa.types.is_string(field.type) else float(one) for one in given]
        assert read == wanted, field.name


@ON_FILES_IN_CHAOS
def test_the_penguins_are_made_ready_for_training(stack: DataStack, client: DataClient, dataset: str) -> None:
    version, rows = tabular(stack, dataset, "penguins.csv")
    numbers = ["bill_length_mm", "body_mass_g"]
    chain = [steps.filter_rows("sex is not None")]
    chain += [steps.cast(name, "double") for name in numbers]
    chain += [steps.standardize(name) for name in numbers]
    chain += [steps.one_hot_encode("island"), steps.ordinal_encode("species")]
    chain += [steps.concat([*numbers, "island"], "features"), steps.select("features", "species")]

    made = transformed(
        client,
        version.name,
        transform=transform_pb2.Transform(steps=chain),
        splits=hash_split(["bill_length_mm", "bill_depth_mm"], {"train": 0.8, "test": 0.2}, seed=3),
    )

    whole = [row for row in rows if row["sex"] not in ("", "NA")]
    assert made.row_count == len(whole)
    columns = {column.name: column for column in made.columns}
    assert columns["species"].value_names == ["Adelie", "Chinstrap", "Gentoo"]
    assert list(columns["features"].shape) == [5]
    features = {
        split: client.read(made.name, split=split).column("features").combine_chunks().to_numpy_ndarray()
        for split in ("train", "test")
    }
    # What was learnt, was learnt on the training split.
    np.testing.assert_allclose(features["train"][:, :2].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(features["train"][:, :2].std(axis=0), 1, atol=1e-6)
    learnt = made.transform.steps[3].standardize
    masses = np.array([float(row["bill_length_mm"]) for row in whole])
    wanted = ((masses - learnt.mean) / learnt.deviation).astype(np.float32)
    found = np.concatenate([features["train"][:, 0], features["test"][:, 0]])
    assert sorted(found.tolist()) == sorted(wanted.tolist())


@ON_S3_IN_CHAOS
def test_the_penguins_are_made_ready_by_options_of_the_command(
    stack: DataStack, client: DataClient, dataset: str
) -> None:
    version, rows = tabular(stack, dataset, "penguins.csv")
    options = ["--filter", "sex is not None", "--fill-nulls", "body_mass_g=median", "--standardize", "body_mass_g"]
    options += ["--one-hot", "island,sex", "--ordinal-encode", "species", "--cast", "bill_length_mm=double"]
    options += ["--concat", "features=body_mass_g,bill_length_mm,island,sex", "--select", "features,species"]
    options += ["--split", "train=0.8,test=0.2", "--json", "--data-address", stack.service.address]

    result = CliRunner().invoke(millrace, ["data", "transform", version.name, *options])

    assert result.exit_code == 0, result.output
    made = json_format.ParseDict(json.loads(result.stdout), DatasetVersion())
    assert {split.name for split in made.splits} == {"train", "test"}
    assert sum(split.row_count for split in made.splits) == sum(row["sex"] not in ("", "NA") for row in rows)
    columns = {column.name: column for column in made.columns}
    assert list(columns) == ["features", "species"]
    assert list(columns["features"].shape) == [1 + 1 + 3 + 2]
    features = client.read(made.name, split="train").column("features").combine_chunks().to_numpy_ndarray()
    np.testing.assert_allclose(features[:, 0].mean(), 0, atol=1e-6)


@ON_S3_IN_CHAOS
def test_the_taxi_rides_come_back_and_are_cut_by_time(stack: DataStack, client: DataClient, dataset: str) -> None:
    version, rows = tabular(stack, dataset, "taxis.csv")
    table = client.read(version.name)
    assert table.num_rows == len(rows) == 6433
    assert pa.types.is_timestamp(table.schema.field("pickup").type)
    for column in ("pickup", "dropoff"):
        assert [str(one) for one in table.column(column).to_pylist()] == [row[column] for row in rows]
    for column in ("passengers", "distance", "fare", "tip", "tolls", "total"):
        assert table.column(column).to_pylist() == [float(row[column]) for row in rows], column
    for column in ("color", "payment", "pickup_zone", "dropoff_zone", "pickup_borough", "dropoff_borough"):
        # An empty field is a null, as everywhere.
        assert table.column(column).to_pylist() == [row[column] or None for row in rows], column

    periods = [pb.Period(split="train"), pb.Period(split="test")]
    periods[0].before.FromJsonString("2019-03-24T00:00:00Z")
    made = transformed(client, version.name, splits=pb.SplitRule(time=pb.TimeSplit(column="pickup", periods=periods)))

    early = [row for row in rows if row["pickup"] < "2019-03-24"]
    assert {split.name: split.row_count for split in made.splits} == {
        "train": len(early),
        "test": len(rows) - len(early),
    }
    assert client.read(made.name, split="train").equals(
        table.take(pa.array([index for index, row in enumerate(rows) if row["pickup"] < "2019-03-24"]))
    )


@ON_S3_IN_CHAOS
def test_ants_and_bees_are_imported_byte_for_byte_and_resized(
    stack: DataStack, client: DataClient, dataset: str
) -> None:
    folder = stack.inputs / "ants_bees"
    if not folder.exists():
        shutil.copytree(real_data() / "ants_bees", folder)
    sources = [
        pb.ImportSource(split=split, image_folder=pb.ImageFolderSource(uri=f"{(folder / given).as_uri()}/"))
        for split, given in (("train", "train"), ("validation", "val"))
    ]

    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=sources))

    table = client.read(version.name, split="train")
    files = sorted((folder / "train").rglob("*.jpg"), key=lambda path: os.fsencode(path))
    assert table.column("path").to_pylist() == [str(path.relative_to(folder / "train")) for path in files]
    assert table.column("image").to_pylist() == [path.read_bytes() for path in files]
    assert table.column("label").to_pylist() == [["ants", "bees"].index(path.parent.name) for path in files]
    assert {column.name: list(column.value_names) for column in version.columns}["label"] == ["ants", "bees"]

    chain = [steps.decode_image("image"), steps.resize("image", 64, 64)]
    made = transformed(client, version.name, transform=transform_pb2.Transform(steps=chain))

    assert {split.name: split.row_count for split in made.splits} == {"train": 60, "validation": 20}
    small = client.read(made.name, split="train").column("image").combine_chunks().to_numpy_ndarray()
    for pixels, path in zip(small, files, strict=True):
        image = Image.open(path).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(pixels, np.asarray(image))


@ON_S3_IN_CHAOS
def test_a_preview_of_encoded_images_has_a_contact_sheet(stack: DataStack, client: DataClient, dataset: str) -> None:
    folder = stack.inputs / "few"
    if not folder.exists():
        (folder / "ants").mkdir(parents=True)
        for path in sorted((real_data() / "ants_bees" / "train" / "ants").iterdir())[:3]:
            shutil.copy(path, folder / "ants")
    source = pb.ImportSource(split="train", image_folder=pb.ImageFolderSource(uri=f"{folder.as_uri()}/"))
    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[source]))

    preview = client.data.PreviewVersion(pb.PreviewVersionRequest(name=version.name), timeout=60)

    sheet = Image.open(io.BytesIO(preview.contact_sheet_png))
    assert min(sheet.size) > 50
