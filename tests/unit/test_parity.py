"""No skew between training and serving: the model sees bit for bit the same tensor of a row, whoever prepares it.

Each step, alone and in chains since ingest, is applied in all places where it may be: by the job that makes a dataset
version (its real code, without Ray), by the training loader, and by the served model's preprocessing, which gets the
rows as they were ingested, through the encoding and decoding of the Open Inference Protocol.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pytest
from PIL import Image

from inference_service.domain.signature import (
    NULLS,
    Array,
    Rows,
    Signature,
    TensorSpec,
    WireTensor,
    encode_raw,
    encode_typed,
    has_typed_form,
    rows_of,
)
from inference_service.serve.preprocessing import Preprocessing as ServedPreprocessing
from millrace.common.v1 import transform_pb2
from shared.checkpoint import CheckpointContent
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.manifest import tensor_array
from shared.jobs import JobState
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms import batch_of
from shared.transforms.pipeline import STEPS, Pipeline
from tests.support.real_data import real_data
from tests.support.transforming import SOURCE, commit_tables, transform_here
from train_service.domain.order import BatchPlan
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Loader, RowCache
from train_service.loading.preprocessing import Preprocessing, ingested_columns

Steps = list[dict[str, Any]]
ROWS = 90


@dataclass(frozen=True)
class Case:
    """`steps` are under test; `closing` makes the float32 tensor `input_column` of what they leave."""

    rows: Callable[[], pa.Table]
    steps: Steps
    closing: Steps
    input_column: str


def numbers() -> pa.Table:
    """Generated rows of every kind of column that can be served; `b`, `t` and `m` have nulls."""
    random = np.random.default_rng(11)
    some = random.random(ROWS) < 0.2
    words = np.array(["", "oak", "elm", "ash", "Größe", "日本"])
    return pa.table(
        {
            "a": random.standard_normal(ROWS) * 10.0 ** random.integers(-8, 9, ROWS),
            "b": pa.array(random.standard_normal(ROWS).astype(np.float32), mask=some),
            "h": pa.array(random.standard_normal(ROWS).astype(np.float16)),
            "i": random.integers(-(2**31), 2**31, ROWS, np.int64),
            "u": random.integers(0, 256, ROWS, np.uint8),
            "s": words[random.integers(0, len(words), ROWS)].tolist(),
            "t": pa.array(words[random.integers(0, len(words), ROWS)].tolist(), mask=some),
            "m": pa.array(random.integers(0, 5, ROWS).astype(np.int32), mask=some),
            "f": random.random(ROWS) < 0.5,
            "w": pa.array(random.integers(0, 2**40, ROWS), pa.timestamp("us", "UTC")),
            "d": pa.array(random.integers(0, 20_000, ROWS).astype(np.int32), pa.date32()),
            "v": tensor_array(random.standard_normal((ROWS, 2, 3)).astype(np.float32)),
            "c": pa.array(random.integers(0, 4, ROWS).astype(np.int32) * 3600, pa.time32("s"), mask=some),
            "e": pa.array(random.integers(0, 4, ROWS).astype(np.int32) + 5_000_000, pa.date32(), mask=some),
            "k": [f"{hour:02d}:30" for hour in random.integers(0, 24, ROWS)],
        }
    )


def pixels() -> pa.Table:
    """Decoded colour images, float images and grey ones."""
    random = np.random.default_rng(12)
    colour = random.integers(0, 256, (ROWS, 13, 11, 3), np.uint8)
    floats = random.random((ROWS, 3, 5, 4), np.float32)
    grey = random.integers(0, 256, (ROWS, 9, 8), np.uint8)
    return pa.table({"image": tensor_array(colour), "floats": tensor_array(floats), "grey": tensor_array(grey)})


def encoded() -> pa.Table:
    """Encoded images of unequal sizes: photographs where they are at hand, and generated ones of other formats."""
    random = np.random.default_rng(13)
    files = [path.read_bytes() for path in sorted((real_data() / "ants_bees").glob("val/*/*.jpg"))]
    for index in range(24):
        height, width = random.integers(20, 60, 2).tolist()
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        data = io.BytesIO()
        image.convert("L" if index % 3 == 0 else "RGB").save(data, ["PNG", "JPEG", "BMP"][index % 3])
        files.append(data.getvalue())
    return pa.table({"image": pa.array(files, pa.binary())})


def penguins() -> pa.Table:
    path = real_data() / "tabular" / "penguins.csv"
    return csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=True))


def wobble(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A custom function: two columns become one of another name and type."""
    a = batch["a"].to_numpy(zero_copy_only=False)
    flags = batch["f"].to_numpy(zero_copy_only=False)
    return pa.RecordBatch.from_pydict({"wobbled": pa.array(np.where(flags, np.sin(a), a), pa.float64())})


def joined(*columns: str) -> Steps:
    return [{"concat": {"columns": list(columns), "into": "x"}}]


def one(column: str, **step: Any) -> Steps:
    return [{"column": column, **step}]


FLOAT = one("image", toFloat={})

ALONE = {
    "select": Case(numbers, [{"select": {"columns": ["v", "a", "label", "original"]}}], joined("a", "v"), "x"),
    "drop": Case(numbers, [{"drop": {"columns": ["s", "b"]}}], joined("a", "v"), "x"),
    "rename": Case(numbers, [{"rename": {"columns": {"a": "i", "i": "a"}}}], joined("a", "i"), "x"),
    "filter": Case(numbers, [{"filter": {"expression": "a > 0 and (b is None or b < 1)"}}], joined("a", "v"), "x"),
    "cast integer": Case(numbers, one("i", cast={"arrowType": "double"}), joined("i"), "x"),
    "cast timestamp": Case(numbers, one("w", cast={"arrowType": "int64"}), joined("w"), "x"),
    "cast date": Case(numbers, one("d", cast={"arrowType": "int32"}), joined("d"), "x"),
    "fill nulls": Case(numbers, one("b", fillNulls={"value": {"number": 0.5}}), joined("b"), "x"),
    "fill nulls mean": Case(numbers, one("b", fillNulls={"statistic": "STATISTIC_MEAN"}), joined("b"), "x"),
    "fill nulls median": Case(numbers, one("m", fillNulls={"statistic": "STATISTIC_MEDIAN"}), joined("m"), "x"),
    "fill nulls mode": Case(numbers, one("m", fillNulls={"statistic": "STATISTIC_MODE"}), joined("m"), "x"),
    "fill nulls of times": Case(
        numbers,
        one("c", fillNulls={"statistic": "STATISTIC_MODE"}),
        one("c", cast={"arrowType": "int32"}) + joined("c"),
        "x",
    ),
    "fill nulls of far dates": Case(
        numbers,
        one("e", fillNulls={"statistic": "STATISTIC_MEDIAN"}),
        one("e", cast={"arrowType": "int32"}) + joined("e"),
        "x",
    ),
    "cast text to time": Case(
        numbers,
        one("k", cast={"arrowType": "time32[s]"}),
        one("k", cast={"arrowType": "int32"}) + joined("k"),
        "x",
    ),
    "standardize": Case(numbers, one("a", standardize={}), joined("a"), "x"),
    "min max": Case(numbers, one("a", minMaxScale={"clip": True}), joined("a"), "x"),
    "ordinal": Case(numbers, one("s", ordinalEncode={"unknown": "UNKNOWN_VALUE_ENCODE"}), joined("s"), "x"),
    "one hot": Case(numbers, one("t", oneHotEncode={"unknown": "UNKNOWN_VALUE_ENCODE"}), joined("t"), "x"),
    "one hot integers": Case(numbers, one("m", oneHotEncode={"unknown": "UNKNOWN_VALUE_ENCODE"}), joined("m"), "x"),
    "tokenize": Case(
        numbers,
        one("s", tokenize={"maxLength": 16, "vocabularySize": 270}),
        joined("input_ids", "attention_mask"),
        "x",
    ),
    "bucketize": Case(numbers, one("a", bucketize={"boundaries": [-1.0, 0.0, 1e-3, 10.0]}), joined("a"), "x"),
    "concat": Case(numbers, joined("f", "v", "u", "a", "i", "h"), [], "x"),
    "custom": Case(
        numbers,
        [{"custom": {"function": "tests.unit.test_parity:wobble", "columns": ["a", "f"]}}],
        joined("wobbled"),
        "x",
    ),
    "decode and crop": Case(
        encoded, one("image", decodeImage={}) + one("image", centerCrop={"height": 24, "width": 30}), FLOAT, "image"
    ),
    "decode grey and resize": Case(
        encoded,
        one("image", decodeImage={"mode": "MODE_GRAY"}) + one("image", resize={"height": 16, "width": 20}),
        FLOAT,
        "image",
    ),
    "resize": Case(pixels, one("image", resize={"height": 7, "width": 17}), FLOAT, "image"),
    "resize of the shorter side": Case(
        pixels, one("image", resize={"height": 7, "shorterSideOnly": True}), FLOAT, "image"
    ),
    "crop": Case(pixels, one("image", centerCrop={"height": 15, "width": 6}), FLOAT, "image"),
    "grey": Case(pixels, one("image", grayscale={}), FLOAT, "image"),
    "to float": Case(pixels, FLOAT, [], "image"),
    "to float of grey": Case(pixels, one("grey", toFloat={}), [], "grey"),
    "normalize": Case(pixels, one("floats", normalize={"mean": [0.1, 0.4, 0.7], "std": [0.3, 0.9, 2]}), [], "floats"),
}

# Steps that act in training alone; `image` is theirs.
AUGMENTATIONS = {
    "random flip": one("image", randomFlip={"horizontalProbability": 0.5, "verticalProbability": 0.5}),
    "random crop": one("image", randomCrop={"height": 8, "width": 8, "padding": 2}),
    "random rotation": one("image", randomRotation={"degrees": 30}),
    "colour jitter": one("image", colorJitter={"brightness": 0.5}),
    "all": [
        *one("image", randomFlip={"horizontalProbability": 0.5}),
        *one("image", randomRotation={"degrees": 20}),
        *one("image", randomCrop={"height": 8, "width": 8, "padding": 2}),
        *one("image", colorJitter={"contrast": 0.5, "saturation": 0.5}),
    ],
}

NUMBERS = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"]
CHAINS = {
    "penguins": Case(
        penguins,
        [
            {"filter": {"expression": "bill_length_mm is None or bill_length_mm > 35"}},
            *(step for name in NUMBERS for step in one(name, fillNulls={"statistic": "STATISTIC_MEDIAN"})),
            *(step for name in NUMBERS for step in one(name, standardize={})),
            *one("sex", fillNulls={"value": {"text": "unknown"}}),
            *one("sex", oneHotEncode={}),
            *one("island", ordinalEncode={}),
            {"rename": {"columns": {"island": "place"}}},
            {"drop": {"columns": ["species"]}},
        ],
        joined(*NUMBERS, "sex", "place"),
        "x",
    ),
    "photographs": Case(
        encoded,
        [
            *one("image", decodeImage={}),
            *one("image", resize={"height": 40, "shorterSideOnly": True}),
            *one("image", centerCrop={"height": 32, "width": 32}),
        ],
        [*FLOAT, *one("image", normalize={"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]})],
        "image",
    ),
    "custom in the middle": Case(
        numbers,
        [
            *one("b", fillNulls={"statistic": "STATISTIC_MEAN"}),
            {"custom": {"function": "tests.unit.test_parity:wobble", "columns": ["a", "f"]}},
            *one("wobbled", standardize={}),
            *one("t", oneHotEncode={}),
            {"rename": {"columns": {"wobbled": "a"}}},
        ],
        joined("a", "b", "t", "v"),
        "x",
    ),
}


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


def test_every_step_is_tried_alone() -> None:
    lists = [*(case.steps for case in ALONE.values()), *AUGMENTATIONS.values()]
    alone = [{step.op for step in Pipeline.from_config({"steps": steps}).steps} for steps in lists]
    # What it makes of files of unequal sizes is no tensor before a step more.
    tried = {op for ops in alone for op in ops if len(ops - {"decode_image"}) == 1}

    assert tried == set(STEPS)


def test_every_statistic_that_fills_nulls_is_tried_alone() -> None:
    tried = {
        step["fillNulls"].get("statistic") for case in ALONE.values() for step in case.steps if "fillNulls" in step
    }

    assert tried - {None} == set(transform_pb2.FillNulls.Statistic.keys()) - {"STATISTIC_UNSPECIFIED"}


@pytest.mark.parametrize("case", [*ALONE.values(), *CHAINS.values()], ids=[*ALONE, *CHAINS])
def test_a_row_is_prepared_the_same_in_a_version_in_training_and_in_serving(store: ObjectStore, case: Case) -> None:
    given = case.rows()
    original = np.arange(given.num_rows)
    ingested = given.append_column("label", pa.array(original % 7)).append_column("original", pa.array(original))
    cut = given.num_rows // 3 * 2
    commit_tables(store, {"train": ingested.slice(0, cut), "validation": ingested.slice(cut)})
    job = transform_here(store, case.steps)
    assert job.state is JobState.SUCCEEDED, job.error

    prepared_in_version = Trained(store, job.name, case.closing, case.input_column)
    learnt = load_version(store, job.name).manifest.transforms[-1]["steps"]
    row_wise = [step for step in learnt if "filter" not in step]
    prepared_in_training = Trained(store, SOURCE, row_wise + case.closing, case.input_column)

    expected = prepared_in_version.inputs() | prepared_in_version.evaluated("validation")
    loaded = prepared_in_training.inputs() | prepared_in_training.evaluated("validation")
    dropped = len(ingested) - len(expected)
    assert (dropped > 0, len(loaded)) == ("filter" in str(case.steps), len(ingested))
    for trained in (prepared_in_version, prepared_in_training):
        served = Served(trained.content())
        for inputs in (*served.one_by_one(ingested), *served.batched(ingested)):
            for row, tensor in expected.items():
                assert tensor.dtype == np.float32
                assert loaded[row].tobytes() == tensor.tobytes(), f"row {row} in training"
                assert inputs[row].tobytes() == tensor.tobytes(), f"row {row} in serving"


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_augmentations_act_in_training_alone(store: ObjectStore, augmentation: Steps) -> None:
    ingested = pixels().append_column("label", pa.array([0] * ROWS)).append_column("original", pa.array(range(ROWS)))
    commit_tables(store, {"train": ingested})
    trained = Trained(store, SOURCE, [*augmentation, *FLOAT], "image")

    evaluated = trained.evaluated("train")
    (served,) = Served(trained.content()).batched(ingested)
    augmented, again = trained.inputs(), trained.inputs(world_size=3)

    assert all(served[row].tobytes() == tensor.tobytes() for row, tensor in evaluated.items())
    assert sum(augmented[row].tobytes() != tensor.tobytes() for row, tensor in evaluated.items()) > ROWS // 2
    assert all(again[row].tobytes() == tensor.tobytes() for row, tensor in augmented.items())


class Trained:
    """A training job on a version: the inputs that its loader gives, and what its checkpoints say."""

    def __init__(self, store: ObjectStore, version: str, steps: Steps, input_column: str) -> None:
        self._version = load_version(store, version)
        self._reader = VersionReader(store, self._version)
        self._spec = TrainingSpec(
            dataset_version=version,
            input_column=input_column,
            transform={"steps": steps},
            model=ModelSpec(builder="torchvision.resnet18", in_channels=3, num_classes=7),
            epochs=1,
            global_batch_size=13,
            lanes=5,
        )
        self._preprocessing = Preprocessing(self._spec, self._version.columns)

    def inputs(self, world_size: int = 1) -> dict[int, Array]:
        """The training split through the loader, by the place of the row as ingested."""
        found: dict[int, Array] = {}
        for rank in range(world_size):
            plan = BatchPlan(5, self._spec.lanes, self._spec.global_batch_size, 1, rank, world_size)
            for batch in Loader(self._cache("train"), self._preprocessing, plan).batches(0):
                found.update(zip(self._originals(batch.row_ids), batch.inputs, strict=True))
        return found

    def evaluated(self, split: str) -> dict[int, Array]:
        """As evaluation prepares it."""
        cache = self._cache(split)
        rows = cache.rows(np.arange(sum(cache.row_groups)))
        return dict(zip(self._originals(rows.row_ids), self._preprocessing(rows), strict=True))

    def content(self) -> CheckpointContent:
        """As it comes back from a checkpoint's manifest."""
        content = CheckpointContent(
            training_job="trainingJobs/a",
            dataset_version=self._version.name,
            dataset_manifest_sha256=self._version.manifest_sha256,
            step=1,
            epoch=0,
            seed=5,
            metrics={},
            model=self._spec.model,
            ingested=ingested_columns(self._version),
            transforms=[*self._version.manifest.transforms, self._preprocessing.config],
            input_column=self._spec.input_column,
        )
        return CheckpointContent.from_manifest(json.loads(json.dumps(content.as_manifest())))

    def _cache(self, split: str) -> RowCache:
        return RowCache(self._reader, split, self._preprocessing.columns, "label", 7, 2**30)

    def _originals(self, row_ids: Array) -> list[int]:
        groups = [group for split in self._version.manifest.splits for group in self._reader.row_groups(split.name)]
        originals = pa.concat_tables([self._reader.read(group, ["original"]) for group in groups])["original"]
        return [int(originals[row_id].as_py()) for row_id in row_ids.tolist()]


class Served:
    """The served model's preprocessing, behind the protocol's encoding."""

    def __init__(self, content: CheckpointContent) -> None:
        self._preprocessing = ServedPreprocessing(content, ["tests.unit.test_parity:wobble"])
        signature = Signature(self._preprocessing.raw, self._preprocessing.prepared, ())
        self._signature = Signature.from_record(json.loads(json.dumps(signature.as_record())))

    def one_by_one(self, ingested: pa.Table) -> Iterator[Array]:
        """Each row in a request of its own, with contents raw and, where all datatypes have them, typed."""
        for typed in {False, all(has_typed_form(spec.datatype) for spec in self._signature.raw)}:
            requests = [self._request(ingested.slice(row, 1), typed) for row in range(ingested.num_rows)]
            yield np.concatenate([self._prepare(request) for request in requests])

    def batched(self, ingested: pa.Table) -> Iterator[Array]:
        """Request of several sizes, gathered into one batch."""
        cuts = [0, 1, 8, 9, 30, ingested.num_rows]
        requests = [
            self._request(ingested.slice(start, stop - start), False) for start, stop in itertools.pairwise(cuts)
        ]
        yield self._prepare(Rows.joined(requests))

    def _prepare(self, rows: Rows) -> Array:
        prepared, refused, _ = self._preprocessing.prepare(rows)
        assert not refused
        assert self._signature.prepared is not None
        assert prepared.shape[1:] == self._signature.prepared.shape[1:]
        return prepared

    def _request(self, rows: pa.Table, typed: bool) -> Rows:
        tensors: list[WireTensor] = []
        batch = batch_of(rows)
        for spec in self._signature.raw:
            column = batch[spec.name]
            if isinstance(column, np.ndarray):
                tensors.append(wire(spec, column, typed))
                continue
            assert isinstance(column, pa.Array)
            values = [_plain(value, spec) for value in column]
            kind: Any = object if spec.datatype == "BYTES" else np.dtype(_DTYPES[spec.datatype])
            array = np.empty(len(values), kind)
            array[:] = values
            tensors.append(wire(spec, array, typed))
            if column.null_count:
                nulls = column.is_null().to_numpy(zero_copy_only=False)
                tensors.append(wire(TensorSpec(spec.name + NULLS, "BOOL", (-1,)), nulls, typed))
        indexed = [replace(tensor, field=f"inputs[{index}]") for index, tensor in enumerate(tensors)]
        return rows_of(self._signature, indexed, 1000)


_DTYPES = {"FP64": "f8", "FP32": "f4", "FP16": "f2", "INT64": "i8", "INT32": "i4", "UINT8": "u1", "BOOL": "?"}


def _plain(value: pa.Scalar, spec: TensorSpec) -> Any:
    """As a client would send it; something else in the place of a null."""
    if spec.datatype == "BYTES":
        given = value.as_py()
        return (given.encode() if isinstance(given, str) else given) if value.is_valid else b"\xff null"
    if not value.is_valid:
        return 1
    stored = getattr(value, "value", None)  # of a timestamp or a date, the number in the column's unit
    return stored if isinstance(stored, int) else value.as_py()


def wire(spec: TensorSpec, values: Array, typed: bool) -> WireTensor:
    if typed:
        field, elements = encode_typed(spec.datatype, values)
        return WireTensor("", spec.name, spec.datatype, values.shape, None, {field: elements} if elements else {})
    return WireTensor("", spec.name, spec.datatype, values.shape, encode_raw(spec.datatype, values), {})
