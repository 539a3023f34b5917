from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.domain.dataset import Committed, Retention, check_retention, outlived
from shared.errors import InvalidArgument

DAY = 86_400.0
NOW = 100 * DAY
# v1 is ten days old, v5 was committed just now.
VERSIONS = [Committed(f"v{number}", NOW - days * DAY) for number, days in enumerate((10, 5, 3, 1, 0), start=1)]


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(), []),
        (Retention(keep_newest=2), ["v1", "v2", "v3"]),
        (Retention(keep_newest=9), []),
        (Retention(max_age_s=2 * DAY), ["v1", "v2", "v3"]),
        (Retention(keep_newest=4, max_age_s=2 * DAY), ["v1"]),
        (Retention(keep_newest=1, max_age_s=4 * DAY), ["v1", "v2"]),
    ],
)
def test_a_version_goes_when_every_rule_that_is_set_says_so(retention: Retention, gone: list[str]) -> None:
    assert outlived(retention, VERSIONS[::-1], NOW) == gone


def test_a_version_in_use_stays_and_does_not_keep_another() -> None:
    used = [Committed("v1", 1.0, in_use=True), Committed("v2", 2.0), Committed("v3", 3.0, in_use=True)]
    assert outlived(Retention(keep_newest=1), used, NOW) == ["v2"]


def test_the_newest_stays_however_old() -> None:
    assert outlived(Retention(max_age_s=1), [Committed("v1", 0.0)], NOW) == []


@given(
    st.lists(st.tuples(st.floats(0, NOW), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 5),
    st.floats(0, NOW),
)
def test_neither_the_newest_nor_a_used_one_ever_goes(
    given_versions: list[tuple[float, bool]], keep_newest: int, max_age_s: float
) -> None:
    versions = [Committed(f"v{index:02d}", time, used) for index, (time, used) in enumerate(given_versions)]
    gone = outlived(Retention(keep_newest=keep_newest, max_age_s=max_age_s), versions, NOW)
    by_name = {one.name: one for one in versions}
    newest = max(versions, key=lambda one: (one.commit_time, one.name))
    assert newest.name not in gone
    assert not any(by_name[name].in_use for name in gone)
    assert len(versions) - len(gone) >= min(keep_newest, len(versions))


def test_each_wrong_field_is_named() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_retention(Retention(keep_newest=-1, max_age_s=-2))
    assert [field for field, _ in refused.value.fields] == ["retention.keep_newest", "retention.max_age"]
