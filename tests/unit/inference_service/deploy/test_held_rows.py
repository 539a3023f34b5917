"""Rows of a real dataset version, as a model takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inference_service.deploy.rollout_driver import holdout_rows
from inference_service.domain.signature import RAW, TensorSpec
from shared.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.wishes import DATASET, DIGITS


@pytest.fixture
def store(store: ObjectStore) -> ObjectStore:
    """With a version of 30 rows to train on, and 20 to test on."""
    commit_version(store, DATASET, {"train": striped_digits(30), "test": striped_digits(20, seed=1)})
    return store


@pytest.mark.parametrize(("most", "rows"), [(7, 7), (20, 20), (1000, 20)])
def test_the_first_rows_of_the_split_come_as_they_were_ingested(store: ObjectStore, most: int, rows: int) -> None:
    found = holdout_rows(store, DATASET, "test", most, DIGITS)
    assert (found.form, list(found.values), found.nulls) == (RAW, ["image"], {})
    np.testing.assert_array_equal(found.values["image"], striped_digits(20, seed=1)[0][:rows])


def test_columns_with_one_value_a_row_come_as_tensors(store: ObjectStore) -> None:
    label = TensorSpec("label", "INT64", (-1,), nullable=True)
    found = holdout_rows(store, DATASET, "test", 5, replace(DIGITS, raw=(label,)))
    assert found.values["label"].tolist() == striped_digits(20, seed=1)[1][:5].tolist()


@pytest.mark.parametrize(
    ("version", "split", "column", "error"),
    [
        ("datasets/x/versions/v1", "test", DIGITS.raw[0], NotFound),
        (DATASET, "no", DIGITS.raw[0], InvalidArgument),
        (DATASET, "test", TensorSpec("picture", "UINT8", (-1, 28, 28)), FailedPrecondition),
        (DATASET, "test", TensorSpec("image", "UINT8", (-1, 32, 32)), FailedPrecondition),
        (DATASET, "test", TensorSpec("image", "INT8", (-1, 28, 28)), FailedPrecondition),
    ],
)
def test_rows_that_are_not_what_the_model_takes_are_refused(
    store: ObjectStore, version: str, split: str, column: TensorSpec, error: type[Exception]
) -> None:
    with pytest.raises(error):
        holdout_rows(store, version, split, 5, replace(DIGITS, raw=(column,)))
