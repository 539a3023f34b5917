from __future__ import annotations

import pytest

from data_service.domain.dataset import Dataset, check_fields
from shared.errors import InvalidArgument


def test_the_longest_fields_are_accepted() -> None:
    check_fields("a" * 63, "é" * 63, "d" * 4096)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_fields("Digits", "n" * 64, "d" * 4097)
    assert [field for field, _ in refused.value.fields] == ["dataset_id", "display_name", "description"]


@pytest.mark.parametrize("dataset_id", ["", "1a", "a_b", "a/b", "a" * 64, "ä", "a\n"])
def test_an_id_that_is_no_id_is_refused(dataset_id: str) -> None:
    with pytest.raises(InvalidArgument, match="dataset_id"):
        check_fields(dataset_id, "", "")


def test_a_dataset_survives_the_log() -> None:
    dataset = Dataset(name="datasets/d", uid="u", display_name="D", description="", create_time=1.5)
    assert Dataset.from_state(dataset.as_state()) == dataset
