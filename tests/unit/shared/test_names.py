"""Resource names: what is an id, and what a refusal says."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import names
from shared.errors import InvalidArgument

IDS = st.from_regex(r"[a-z][a-z0-9-]{0,62}", fullmatch=True)


@given(IDS)
def test_an_id_is_returned_as_it_is(value: str) -> None:
    assert names.check_id("dataset_id", value) == value


@pytest.mark.parametrize(
    "value",
    ["", "A", "1a", "-a", "a_b", "a/b", "a.b", "ä", "a" * 64, "a b", "a\n", "..", "a\x00", "ａ", "a²"],
    ids=lambda value: ascii(value)[:12],
)
def test_an_invalid_id_is_refused_by_its_field(value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        names.check_id("dataset_id", value)

    assert refused.value.specific_reason == "INVALID_FIELD"
    assert refused.value.fields[0][0] == "dataset_id"
    assert "1 to 63 of a-z" in refused.value.message


def test_a_split_may_have_underscores_and_an_id_may_not() -> None:
    assert names.SPLIT.fullmatch("hold_out-1")
    assert not names.SPLIT.fullmatch("Train")
    with pytest.raises(InvalidArgument):
        names.check_id("dataset_id", "hold_out-1")


@given(IDS, IDS)
def test_the_ids_of_a_name_come_back_in_order(dataset: str, version: str) -> None:
    name = f"datasets/{dataset}/versions/{version}"

    assert names.parse("name", name, "datasets/{d}/versions/{v}") == (dataset, version)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "datasets",
        "datasets/",
        "/datasets/d",
        "datasets/d/",
        "datasets/d/versions/v",
        "Datasets/d",
        "datasets/D",
        "datasets/../secrets",
        "datasets/{d}",
        "datasets/d\n",
        "trainingJobs/d",
        "d",
    ],
    ids=repr,
)
def test_a_name_of_another_form_is_refused_with_the_right_one(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"datasets/\{d\}") as refused:
        names.parse("parent", name, "datasets/{d}")

    assert refused.value.fields[0][0] == "parent"


@given(st.text(max_size=300))
def test_any_text_at_all_is_parsed_or_refused(name: str) -> None:
    try:
        (found,) = names.parse("name", name, "deployments/{m}")
    except InvalidArgument:
        return
    assert name == f"deployments/{names.check_id('m', found)}"


def test_a_long_value_is_cut_in_the_refusal() -> None:
    with pytest.raises(InvalidArgument) as refused:
        names.check_id("dataset_id", "x" * 1_000_000)

    assert len(refused.value.message) < 400


def test_request_ids_are_uuid4_in_one_spelling_or_empty() -> None:
    request_id = str(uuid.uuid4())

    assert names.check_request_id("request_id", request_id) == request_id
    assert names.check_request_id("request_id", request_id.upper()) == request_id
    assert names.check_request_id("request_id", "") == ""


@pytest.mark.parametrize(
    "value",
    [
        "x",
        str(uuid.uuid1()),
        str(uuid.uuid5(uuid.NAMESPACE_URL, "x")),
        uuid.uuid4().hex,
        f"{{{uuid.uuid4()}}}",
        f"urn:uuid:{uuid.uuid4()}",
        f"{uuid.uuid4()}\n",
        "../" + str(uuid.uuid4()),
    ],
    ids=["word", "uuid1", "uuid5", "no-dashes", "braces", "urn", "newline", "path"],
)
def test_other_request_ids_are_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match="UUID4") as refused:
        names.check_request_id("request_id", value)

    assert refused.value.fields[0][0] == "request_id"
