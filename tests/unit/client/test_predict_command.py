"""`millrace predict` on the inference service's own servicer and batcher, with models that remember their rows."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from inference import grpc_service_pb2 as oip
from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec
from millrace.data.v1 import data_service_pb2_grpc
from millrace_client.cli import millrace
from millrace_client.cli.predict import outputs_wanted
from tests.support.deployment_server import weighed
from tests.support.fake_servicers import OneVersion
from tests.support.grpc_answers import serving
from tests.support.inference_server import Server, attach, deployment, inference_server, served

SPECIES = ("Adelie", "Chinstrap", "[Gentoo]")
CLASSIFIER = (
    TensorSpec("logits", "FP32", (-1, 3), class_names=SPECIES),
    TensorSpec("probabilities", "FP32", (-1, 3), class_names=SPECIES),
    TensorSpec("label", "INT64", (-1,)),
)
REGRESSION = (TensorSpec("values", "FP32", (-1, 1)),)
TABLE = (
    TensorSpec("island", "BYTES", (-1,), nullable=True),
    TensorSpec("mass", "FP64", (-1,), nullable=True),
    TensorSpec("year", "INT64", (-1,), nullable=True),
)
ENCODED = (TensorSpec("image", "BYTES", (-1,), nullable=True),)
PIXELS = (TensorSpec("image", "UINT8", (-1, 2, 3)),)
PICTURES = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)

CSV = "id,island,mass,year,sex\na1,Dream,3750.5,2007,M\na2,,NA,2008,F\na3,Torgersen,4000,,\n"
# What of it reaches a model, null where it is null.
CSV_ROWS = [[b"Dream", 3750.5, 2007], [None, None, 2008], [b"Torgersen", 4000.0, None]]


class Remembering:
    """A row is of the class that its number, from 0, has modulo three; one that begins with `refuses` is refused."""

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], refuses: bytes = b"nowhere"
    ) -> None:
        self.signature = Signature(tuple(inputs), TensorSpec("prepared", "FP32", (-1, 3)), tuple(outputs))
        self._refuses = refuses
        self.rows: list[list[Any]] = []
        self.max_together = 0

    async def forward(self, rows: Rows) -> Outputs:
        first, count = len(self.rows), len(rows)
        self.max_together = max(self.max_together, count)
        for index in range(count):
            nulls = {name for name, flags in rows.nulls.items() if flags[index]}
            self.rows.append([None if name in nulls else _plain(v[index]) for name, v in rows.values.items()])
        labels = (first + np.arange(count)) % 3
        refused = {
            i: "tensor 'island': no such island" for i in range(count) if self.rows[first + i][0] == self._refuses
        }
        if len(self.signature.outputs) == 1:
            return Outputs([np.full((count, 1), 206.5, np.float32)], refused)
        logits = np.eye(3, dtype=np.float32)[labels]
        return Outputs([logits, logits * 0.75 + 0.125, labels], refused)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def table_model(**options: Any) -> Remembering:
    return Remembering(TABLE, CLASSIFIER, **options)


def predict(model: Remembering, *arguments: object) -> Result:
    results = []

    async def scenario(server: Server) -> None:
        command = ["predict", "m", *map(str, arguments), "--inference-address", server.kit.address]
        results.append(await asyncio.to_thread(CliRunner().invoke, millrace, command, env={"COLUMNS": "200"}))

    served(scenario, deployment("m", model.signature), model=model)
    assert "Traceback" not in results[0].output
    return results[0]


def predictions(model: Remembering, *arguments: object) -> Any:
    result = predict(model, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["predictions"]


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text(CSV)
    return tmp_path / "rows.csv"


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(file, kind)
    return file.getvalue()


def test_rows_of_a_csv_reach_the_model_in_its_types_with_their_nulls(csv: Path) -> None:
    model = table_model()
    reported = predictions(model, csv)
    assert model.rows == CSV_ROWS
    assert reported == [
        {"source": str(csv), "row": row + 1, "label": row, "class": name, "probability": 0.875}
        for row, name in enumerate(SPECIES)
    ]


def test_a_table_shows_the_rows_first_columns_and_the_class_s_name(csv: Path) -> None:
    result = predict(table_model(), csv)
    assert result.exit_code == 0, result.output
    header, _, first, second, third = [line.split() for line in result.stdout.splitlines() if line.strip()][:5]
    assert header == ["row", "id", "island", "mass", "label", "class", "probability"]
    assert first == [str(csv), "1", "a1", "Dream", "3750.5", "0", "Adelie", "87.5%"]
    assert second == [str(csv), "2", "a2", "1", "Chinstrap", "87.5%"]
    assert third[-2:] == ["[Gentoo]", "87.5%"]
    assert "training run" in result.stdout


def test_a_server_that_offers_no_names_of_labels_is_asked_for_the_classification_that_has_them() -> None:
    outputs = [oip.ModelMetadataResponse.TensorMetadata(name=name) for name in ("logits", "probabilities", "label")]
    older = oip.ModelMetadataResponse(outputs=outputs)
    assert outputs_wanted(older, ["classification"]) == {"logits": 1, "probabilities": 0, "label": 0}
    assert outputs_wanted(older, []) == {}
    label = oip.ModelMetadataResponse.TensorMetadata(name="label_name")
    assert outputs_wanted(oip.ModelMetadataResponse(outputs=[*outputs, label]), []) == {
        "label": 0,
        "label_name": 0,
        "probabilities": 0,
    }


def test_rows_of_a_parquet_file_reach_the_model_in_its_types_with_their_nulls(tmp_path: Path) -> None:
    columns = {
        "year": pa.array([2007.0, 2008.0, None]),  # as pandas has integers with nulls
        "island": pa.array(["Dream", None, "Torgersen"]).dictionary_encode(),
        "mass": pa.array([3750.5, None, 4000.0], pa.float32()),
        "photo": pa.array([b"\xff"] * 3),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    model = table_model()
    assert [one["row"] for one in predictions(model, tmp_path / "rows.parquet")] == [1, 2, 3]
    assert model.rows == CSV_ROWS


def test_several_files_are_asked_about_one_after_the_other(csv: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.parquet"
    pq.write_table(pa.table({"mass": [1.0], "island": ["Biscoe"], "year": [2009]}), other)
    model = table_model()
    reported = predictions(model, csv, other)
    assert [(one["source"], one["row"]) for one in reported] == [
        (str(csv), 1),
        (str(csv), 2),
        (str(csv), 3),
        (str(other), 1),
    ]
    assert model.rows == [*CSV_ROWS, [b"Biscoe", 1.0, 2009]]


def test_columns_may_be_spread_over_files_of_equally_many_rows(tmp_path: Path) -> None:
    (tmp_path / "islands.csv").write_text("island\nDream\nBiscoe\n")
    pq.write_table(pa.table({"mass": [1.0, 2.0], "year": [2007, 2008]}), tmp_path / "rest.parquet")
    model = table_model()
    assert len(predictions(model, tmp_path / "islands.csv", tmp_path / "rest.parquet")) == 2
    assert model.rows == [[b"Dream", 1.0, 2007], [b"Biscoe", 2.0, 2008]]
    (tmp_path / "islands.csv").write_text("island\nDream\n")
    result = predict(model, tmp_path / "islands.csv", tmp_path / "rest.parquet")
    assert "different numbers of rows" in result.stderr


def test_many_rows_go_in_requests_of_the_model_s_batch_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    class Doubling(Remembering):
        async def forward(self, rows: Rows) -> Outputs:
            await super().forward(rows)
            return Outputs([rows.values["mass"].reshape(-1, 1) * 2])

    lines = "".join(f"Dream,{number},2007\n" for number in range(300))
    (tmp_path / "many.csv").write_text(f"island,mass,year\n{lines}")
    for in_flight in ("8", "1000"):
        model = Doubling(TABLE, REGRESSION)
        reported = predictions(model, tmp_path / "many.csv", "--in-flight", in_flight)
        assert [one["row"] for one in reported] == list(range(1, 301))
        assert [one["values"] for one in reported] == [[number * 2] for number in range(300)]
        asked = [row[1] for row in model.rows]
        # Of requests that are on the way together, any may come first.
        assert (asked if in_flight == "8" else sorted(asked)) == list(range(300))
        assert model.max_together == 8
    assert "… and 280 more" in predict(table_model(), tmp_path / "many.csv").stdout
    assert len(predictions(table_model(), tmp_path / "many.csv", "--limit", "13")) == 13


def test_rows_of_long_texts_go_in_requests_that_a_server_takes(tmp_path: Path) -> None:
    texts, others = ["x" * 30_000_000] * 3, {"mass": [1.0, 2.0, 3.0], "year": [1, 2, 3]}
    pq.write_table(pa.table({"island": texts, **others}), tmp_path / "long.parquet")
    model = table_model()
    assert [one["row"] for one in predictions(model, tmp_path / "long.parquet", "--in-flight", "8")] == [1, 2, 3]
    assert [len(row[0]) for row in model.rows] == [30_000_000] * 3
    texts[1] = "x" * 70_000_000
    pq.write_table(pa.table({"island": texts, **others}), tmp_path / "longest.parquet")
    result = predict(table_model(), tmp_path / "longest.parquet")
    assert result.exit_code == 1, result.output
    assert "longest.parquet, row 2 takes 66 MiB, and a server takes 64 MiB in one request" in result.stderr


def test_times_are_sent_in_the_unit_that_the_model_was_trained_on(tmp_path: Path) -> None:
    when = TensorSpec("when", "INT64", (-1,), nullable=True, column_type="timestamp[ms]")
    at = TensorSpec("at", "INT32", (-1,), nullable=True, column_type="time32[s]")
    (tmp_path / "times.csv").write_text("when,at\n1970-01-01T00:00:01.5,00:01\nNA,\n")
    columns = {"when": pa.array([1_500_000, None], pa.timestamp("us")), "at": pa.array([60_000, None], pa.time32("ms"))}
    pq.write_table(pa.table(columns), tmp_path / "times.parquet")
    for name in ("times.csv", "times.parquet"):
        model = Remembering((when, at), REGRESSION)
        predictions(model, tmp_path / name)
        assert model.rows == [[1500, 60], [None, None]]
    (tmp_path / "times.csv").write_text("when,at\n1970-01-01,12:00\n1970-01-01T00:00:01.0005,12:00\n")
    result = predict(Remembering((when, at), REGRESSION), tmp_path / "times.csv")
    assert result.exit_code == 1, result.output
    assert "row 2, column 'when': '1970-01-01T00:00:01.0005' is no timestamp[ms]" in result.stderr


def test_a_model_of_encoded_images_gets_the_bytes_of_image_files(tmp_path: Path) -> None:
    pictures = [picture(3, 2), picture(5, 4, "JPEG")]
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for file, data in zip(files, pictures, strict=True):
        file.write_bytes(data)
    model = Remembering(ENCODED, CLASSIFIER)
    reported = predictions(model, *files, "--in-flight", "1")
    assert model.rows == [[data] for data in pictures]
    assert [(one["source"], one["class"]) for one in reported] == [
        (str(files[0]), "Adelie"),
        (str(files[1]), "Chinstrap"),
    ]
    assert "image" in predict(Remembering(ENCODED, CLASSIFIER), *files).stdout.splitlines()[1]


def test_a_model_of_encoded_images_gets_those_of_a_parquet_file_one_in_a_request(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"\x89PNG\0", b"GIF\0\0"]}), tmp_path / "images.parquet")
    model = Remembering(ENCODED, CLASSIFIER)
    predictions(model, tmp_path / "images.parquet", "--in-flight", "1")
    assert model.rows == [[b"\x89PNG\0"], [b"GIF\0\0"]]
    assert model.max_together == 1


def test_a_model_of_pixels_gets_images_in_its_size(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(picture(30, 20))
    columns = {
        "encoded": [picture(6, 4)],
        "list": pa.array([[7] * 6], pa.list_(pa.uint8(), 6)),
        "raw": [bytes(range(6))],
    }
    for name, values in columns.items():
        pq.write_table(pa.table({"image": values}), tmp_path / f"{name}.parquet")
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(PICTURES)
    pq.write_table(pa.table({"image": tensors}), tmp_path / "tensors.parquet")
    model = Remembering(PIXELS, CLASSIFIER)
    names = ("large.png", "encoded.parquet", "list.parquet", "raw.parquet", "tensors.parquet")
    assert len(predictions(model, *(tmp_path / name for name in names), "--in-flight", "1")) == 6
    white = [[255] * 3] * 2
    assert model.rows == [
        [white],
        [white],
        [[[7] * 3] * 2],
        [[[0, 1, 2], [3, 4, 5]]],
        *([one] for one in PICTURES.tolist()),
    ]


async def test_one_version_is_asked_where_it_is_named(csv: Path) -> None:
    first, second = table_model(), Remembering(TABLE, REGRESSION)
    one = weighed("m", 100, 0)
    signatures = (first.signature, second.signature)
    versions = (replace(v, signature=s) for v, s in zip(one.versions, signatures, strict=True))
    one = replace(one, versions=tuple(versions))
    results = []

    async with inference_server(one, model=first) as server:
        attach(server.models, one, second, number="2")
        command = ["predict", "m", str(csv), "--version", "2", "--json", "--inference-address", server.kit.address]
        results.append(await asyncio.to_thread(CliRunner().invoke, millrace, command))

    document = json.loads(results[0].stdout)
    assert [one["values"] for one in document["predictions"]] == [[206.5]] * 3
    assert document["lineage"]["model_version"] == "2"
    assert (len(first.rows), len(second.rows)) == (0, 3)


def test_a_regression_shows_its_numbers(csv: Path) -> None:
    assert predictions(Remembering(TABLE, REGRESSION), csv, "--limit", "1") == [
        {"source": str(csv), "row": 1, "values": [206.5]}
    ]
    shown = predict(Remembering(TABLE, REGRESSION), csv).stdout.splitlines()
    assert shown[1].split()[-1] == "values"
    assert shown[3].split()[-1] == "206.5"


def serving_rows(**columns: Any) -> AbstractContextManager[str]:
    """A data service with one version."""
    servicer = OneVersion(pa.table(columns))
    return serving(lambda server: data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server))


def test_images_of_a_dataset_version_are_asked_about_and_compared_with_their_labels() -> None:
    model = Remembering(PIXELS, CLASSIFIER)
    with serving_rows(image=pa.FixedShapeTensorArray.from_numpy_ndarray(PICTURES), label=[1, 1]) as address:
        reported = predictions(model, "--dataset", "datasets/d/versions/v", "--data-address", address)
        shown = predict(model, "--dataset", "datasets/d/versions/v", "--data-address", address).stdout
    assert [row[0] for row in model.rows[:2]] == PICTURES.tolist()
    assert [(one["source"], one["label"], one["truth"]) for one in reported] == [("test 0", 0, 1), ("test 1", 1, 1)]
    assert shown.splitlines()[1].split() == ["image", "label", "class", "probability", "truth"]


def test_rows_of_a_dataset_version_are_asked_about_by_column_and_compared_with_their_labels() -> None:
    model = table_model()
    with serving_rows(island=["Dream", None], mass=[1.0, 2.0], year=[1, 2], label=[0, 2]) as address:
        reported = predictions(model, "--dataset", "datasets/d/versions/v", "--data-address", address)
        shown = predict(table_model(), "--dataset", "datasets/d/versions/v", "--data-address", address).stdout
    assert model.rows == [[b"Dream", 1.0, 1], [None, 2.0, 2]]
    assert [(one["source"], one["label"], one["truth"]) for one in reported] == [("test 0", 0, 0), ("test 1", 1, 2)]
    assert "1 of 2 right (50.00%)" in shown


def test_a_row_that_the_model_refuses_is_named_as_its_file_counts_it(csv: Path, tmp_path: Path) -> None:
    result = predict(table_model(refuses=b"Torgersen"), csv)
    assert result.exit_code == 4
    assert f"error: {csv}, row 3: tensor 'island': no such island" in result.stderr
    (tmp_path / "cat.png").write_bytes(b"no picture")
    result = predict(Remembering(ENCODED, CLASSIFIER, refuses=b"no picture"), tmp_path / "cat.png")
    assert f"error: {tmp_path / 'cat.png'}: tensor" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.csv", b"island,mass\nDream,1\n", "has no column year; it has island, mass, and the model's inputs are"),
        ("rows.csv", b"island,mass,year\nDream,1,2\nDream,x,2\n", "row 2, column 'mass': 'x' is no FP64"),
        ("rows.csv", b"island,mass,year\nDream,1,2.5\n", "row 1, column 'year': '2.5' is no INT64"),
        ("rows.csv", b"island,mass,year\n", "has no row"),
        ("rows.csv", b"", "is no CSV that can be read: Empty CSV file"),
        ("rows.csv", b"island,mass,year\nDream,1,2\nDream\n", "row 2: Expected 3 columns, got 1"),
        ("rows.parquet", b"nonsense", "is no Parquet that can be read"),
        ("rows.xlsx", b"PK", "is no image, CSV or Parquet"),
        (
            "cat.png",
            picture(2, 2),
            "is an image, and the model takes island BYTES [-1], mass FP64 [-1], year INT64 [-1]",
        ),
    ],
    ids=["column", "number", "fraction", "no-row", "empty", "ragged", "parquet", "suffix", "image"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_file_that_cannot_be_asked_about_is_reported(
    tmp_path: Path, name: str, content: bytes, expected: str, as_json: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    result = predict(table_model(), tmp_path / name, *(["--json"] if as_json else []))
    assert result.exit_code == 1, result.output
    assert expected in result.stderr
    assert str(tmp_path / name) in result.stderr
    if as_json:
        assert expected in json.loads(result.stdout)["error"]["message"]


def test_an_error_says_what_would_be_taken(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("hello")
    result = predict(table_model(), tmp_path / "rows.txt")
    assert "remedy: name a file that ends in one of .png, .jpg" in result.stderr
    assert ".csv, .csv.gz, .parquet" in result.stderr
    assert predict(table_model(), tmp_path / "nowhere.csv").exit_code == 2


def test_numbers_that_are_not_finite_have_names_in_json(csv: Path) -> None:
    class Endless(Remembering):
        async def forward(self, rows: Rows) -> Outputs:
            return Outputs([np.full((len(rows), 1), np.nan, np.float32)])

    assert predictions(Endless(TABLE, REGRESSION), csv, "--limit", "1")[0]["values"] == ["NaN"]
