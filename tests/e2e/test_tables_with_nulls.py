"""Tables with nulls, from their files to a served model: a NaN in a request is answered as the null that it means."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data.v1.data_service_pb2 import ImportSource
from millrace_client import (
    Millrace,
    connect,
    csv_source,
    hold_out,
    optimizer,
    parquet_source,
    steps,
    training_spec,
)
from millrace_client.errors import InvalidArgument
from millrace_client.stack.record import read_record
from tests.support.command import run_millrace
from tests.support.real_data import real_data

# In `make test`: tests/unit/inference_service/serve/test_nan_rows.py has the same bits, and the page about tables goes
# from a file to answers (test_readme.py).
pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

Array = npt.NDArray[Any]
PENGUINS = {"bill_length_mm": "mean", "bill_depth_mm": "median", "flipper_length_mm": "mode", "body_mass_g": "mean"}
FLOAT_TYPES = {"flipper_length_mm": "float"}
GENERATED = {"narrow": "mean", "wide": "median", "other": "mode"}
ROWS = 600


@dataclass(frozen=True)
class Table:
    """A served model, and the rows to ask it about: of floats those in `nulls`, by column, are null."""

    millrace: Millrace
    model: str
    values: Mapping[str, Array]
    nulls: Mapping[str, Array]

    def with_flags(self) -> dict[str, Array]:
        """Each null as the protocol says it."""
        zeroed = {name: np.where(self.nulls[name], 0, column) for name, column in self.floats().items()}
        flags = {f"{name}.null": where for name, where in self.nulls.items()}
        return {**self.values, **zeroed, **flags}

    def with_nans(self) -> dict[str, Array]:
        """As pandas has such a table."""
        return {**self.values, **self.floats()}

    def floats(self) -> dict[str, Array]:
        return {
            name: np.where(where, np.nan, self.values[name]).astype(self.values[name].dtype)
            for name, where in self.nulls.items()
        }


@pytest.fixture(scope="module")
def millrace(home: Path) -> Iterator[Millrace]:
    record = read_record(home)
    assert record is not None
    addresses = record.addresses
    with connect(data=addresses["data"], train=addresses["train"], inference=addresses["inference"]) as made:
        yield made


@pytest.fixture(scope="module")
def penguins(millrace: Millrace, home: Path) -> Table:
    text = (real_data() / "tabular" / "penguins.csv").read_text()
    (home / "import").mkdir(exist_ok=True)
    (home / "import" / "penguins.csv").write_text(text)
    serve(millrace, "penguins", csv_source("train", home / "import" / "penguins.csv"), PENGUINS, "species", ["island"])
    rows = list(csv.DictReader(text.splitlines()))
    nulls = {name: np.array([not row[name] for row in rows]) for name in PENGUINS}
    values: dict[str, Array] = {
        name: np.array([float(row[name] or 0) for row in rows], "float32" if name in FLOAT_TYPES else "float64")
        for name in PENGUINS
    }
    values["island"] = np.array([row["island"].encode() for row in rows], object)
    return Table(millrace, "penguins", values, nulls)


@pytest.fixture(scope="module")
def generated(millrace: Millrace, home: Path) -> Table:
    generator = np.random.default_rng(5)
    types = {"narrow": np.float32, "wide": np.float64, "other": np.float64}
    values: dict[str, Array] = {
        name: generator.normal(3, 2, ROWS).round(2).astype(kind) for name, kind in types.items()
    }
    nulls = {name: generator.random(ROWS) < 0.2 for name in types}
    label = np.where(values["narrow"] + values["wide"] > 6, "high", "low")
    columns = {name: pa.array(values[name], mask=nulls[name]) for name in types}
    (home / "import").mkdir(exist_ok=True)
    pq.write_table(pa.table({**columns, "kind": label}), home / "import" / "generated.parquet")
    serve(millrace, "generated", parquet_source("train", home / "import" / "generated.parquet"), GENERATED, "kind", [])
    return Table(millrace, "generated", values, nulls)


def serve(
    millrace: Millrace, name: str, source: ImportSource, floats: Mapping[str, str], label: str, texts: list[str]
) -> None:
    """Import the table, prepare it with steps that learn, train a classifier, and deploy it as `name`."""
    millrace.data.create_dataset(name)
    raw = millrace.data.import_version(
        f"datasets/{name}",
        [source],
        hold_outs=[hold_out("train", "validation", 0.2)],
        # Of a CSV whole numbers would be integers, which have no NaN.
        column_types={name: FLOAT_TYPES.get(name, "double") for name in floats} if source.HasField("csv") else {},
    ).wait(timeout_s=900)
    prepares = [
        *(steps.fill_nulls(column, statistic=statistic) for column, statistic in floats.items()),
        *(steps.standardize(column) for column in floats),
        *(steps.one_hot_encode(column) for column in texts),
        steps.ordinal_encode(label),
    ]
    prepared = millrace.data.transform_version(raw.name, prepares).wait(timeout_s=900)
    width = len(floats) + 3 * len(texts)
    spec = training_spec(
        prepared.name,
        model="mlp",
        in_channels=width,
        num_classes=3 if name == "penguins" else 2,
        input_column="x",
        label_column=label,
        transform=[steps.concat([*floats, *texts], "x")],
        optimizer=optimizer("AdamW", 0.02),
        epochs=5,
        global_batch_size=32,
        num_workers=1,
        seed=4,
    )
    job = millrace.train.create_training_job(name, spec)
    for _ in millrace.train.watch_training_job(job.name):
        pass
    millrace.deployments.create_deployment(name, job.name).wait(timeout_s=900)


# Of the penguins a column is narrow, too: the generated table adds Parquet and two classes.
@pytest.mark.parametrize("table", ["penguins", "generated"])
def test_a_nan_is_answered_bit_for_bit_as_null_is(table: str, request: pytest.FixtureRequest) -> None:
    asked: Table = request.getfixturevalue(table)
    infer = asked.millrace.inference.infer
    flagged, holed = (infer(asked.model, inputs).outputs for inputs in (asked.with_flags(), asked.with_nans()))
    assert any(where.any() for where in asked.nulls.values())
    assert list(flagged) == list(holed) == ["logits", "probabilities", "label"]
    for name, values in flagged.items():
        assert np.isfinite(values).all()
        assert values.tobytes() == holed[name].tobytes(), name


def test_an_infinity_is_refused_with_its_row_and_column(penguins: Table) -> None:
    inputs = penguins.with_nans()
    inputs["body_mass_g"][7] = np.inf
    with pytest.raises(InvalidArgument, match=r"row 7: tensor 'body_mass_g': inf is not finite") as refused:
        penguins.millrace.inference.infer("penguins", inputs)
    assert refused.value.metadata["row"] == "7"


def test_the_classes_have_their_names_in_the_answer_and_in_a_shell(penguins: Table, home: Path) -> None:
    wanted = {"label": 0, "label_name": 0}
    answer = penguins.millrace.inference.infer("penguins", penguins.with_nans(), outputs=wanted).outputs
    named = dict(zip(answer["label"].tolist(), answer["label_name"].tolist(), strict=True))
    assert named == {0: b"Adelie", 1: b"Chinstrap", 2: b"Gentoo"}
    shown = run_millrace(home, "predict", "penguins", str(home / "import" / "penguins.csv"), "--limit", "3")
    assert shown.returncode == 0, shown.stderr
    assert "Adelie" in shown.stdout
