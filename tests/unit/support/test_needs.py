"""What a test needs and does not find ends it, with the remedy; as a failure where the environment demands it."""

from __future__ import annotations

import pytest

from tests.support.needs import Missing

NAME = "MILLRACE_REQUIRE_THING"


@pytest.mark.parametrize("environ", [{}, {NAME: ""}, {NAME: "0"}], ids=str)
def test_an_optional_need_skips_and_says_how_to_require_it(environ: dict[str, str]) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no thing: install it.*MILLRACE_REQUIRE_THING=1"):
        Missing("no thing: install it", NAME, environ).end_test()


def test_a_required_need_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="no thing: install it"):
        Missing("no thing: install it", NAME, {NAME: "1"}).end_test()
