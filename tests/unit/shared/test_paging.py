"""Pages: walking them sees every key once, whatever their size and whatever happens in between."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.names import DEFAULT_SIZE, MAX_SIZE, page

KEYS = st.sets(st.text(min_size=1, max_size=8), max_size=60)


def walk(keys: list[str], size: int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        taken, token = page(keys, size, token)
        pages.append(taken)
        if not token:
            return pages
        assert len(pages) < 200


@given(KEYS, st.integers(1, 70))
def test_walking_all_pages_yields_every_key_once_and_in_order(keys: set[str], size: int) -> None:
    pages = walk(list(keys), size)

    assert [key for one in pages for key in one] == sorted(keys)
    assert all(len(one) == size for one in pages[:-1])
    assert pages[-1] or not keys  # the last page is not an empty one, save of nothing


@given(KEYS.filter(lambda keys: len(keys) > 3), st.integers(1, 3), KEYS, KEYS)
def test_keys_that_stay_are_seen_once_while_others_come_and_go(
    keys: set[str], size: int, came: set[str], went: set[str]
) -> None:
    first, token = page(list(keys), size, "")
    rest = list((keys - went) | came)
    seen = list(first)
    while token:
        taken, token = page(rest, size, token)
        seen += taken

    assert len(seen) == len(set(seen))
    assert (keys - went) <= set(seen)


def test_the_size_defaults_and_has_a_limit() -> None:
    keys = [f"{number:05d}" for number in range(3000)]

    assert len(page(keys, 0, "")[0]) == DEFAULT_SIZE
    assert len(page(keys, MAX_SIZE, "")[0]) == MAX_SIZE
    for size in (-1, MAX_SIZE + 1, -(2**31)):
        with pytest.raises(InvalidArgument) as refused:
            page(keys, size, "")
        assert refused.value.fields[0][0] == "page_size"


@pytest.mark.parametrize(
    "token", ["a", "%%%%", "ä", "a b=", "====", base64.b64encode(b"\xff\xfe").decode(), "QQ==\n", "\x00"], ids=ascii
)
def test_a_token_that_never_was_ours_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        page(["a", "b"], 1, token)

    assert refused.value.fields[0][0] == "page_token"


@given(st.text(max_size=40))
def test_any_token_at_all_is_followed_or_refused(token: str) -> None:
    try:
        taken, _ = page(["a", "b", "c"], 2, token)
    except InvalidArgument:
        return
    assert set(taken) <= {"a", "b", "c"}
