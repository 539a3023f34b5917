from __future__ import annotations

import pytest

from shared.settings import CUSTOM_TRANSFORMS_VARIABLE, SettingsError, allowed_functions


def test_functions_are_allowed_only_where_they_are_named() -> None:
    assert allowed_functions({}) == frozenset()
    assert allowed_functions({CUSTOM_TRANSFORMS_VARIABLE: " a.b:f, c:g ,"}) == {"a.b:f", "c:g"}


@pytest.mark.parametrize("named", ["f", "a.b", "a:b:c", "a-b:f", "a:f()"])
def test_a_value_that_is_no_function_is_refused_by_the_variables_name(named: str) -> None:
    with pytest.raises(SettingsError, match=CUSTOM_TRANSFORMS_VARIABLE):
        allowed_functions({CUSTOM_TRANSFORMS_VARIABLE: named})
