"""MILLRACE_OWN_CODE: off unless it is asked for, and never `trusted` where strangers reach the service."""

from __future__ import annotations

import pytest

from shared.errors import FailedPrecondition
from shared.settings import OwnCode, SettingsError, own_code

LOOPBACK = "127.0.0.1:50052"


@pytest.mark.parametrize("environ", [{}, {"MILLRACE_OWN_CODE": ""}, {"MILLRACE_OWN_CODE": "off"}])
@pytest.mark.parametrize("listen", [LOOPBACK, "0.0.0.0:50052"])
def test_own_code_is_off_by_default_wherever_a_service_listens(environ: dict[str, str], listen: str) -> None:
    assert own_code(environ, listen, has_token=False) == OwnCode(is_trusted=False)


@pytest.mark.parametrize("listen", [LOOPBACK, "127.8.9.1:1", "localhost:50052", "[::1]:50052"])
def test_trusted_needs_no_token_on_loopback(listen: str) -> None:
    assert own_code({"MILLRACE_OWN_CODE": "trusted"}, listen, has_token=False).is_trusted


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:50052", "[::]:50052", "10.0.0.7:50052", "train.example.org:50052", "localhost.example.org:1", "unix:0"],
)
def test_trusted_elsewhere_is_refused_without_a_token(listen: str) -> None:
    environ = {"MILLRACE_OWN_CODE": "trusted"}

    with pytest.raises(SettingsError, match="MILLRACE_OWN_CODE=trusted") as raised:
        own_code(environ, listen, has_token=False)
    assert listen in str(raised.value)
    assert "MILLRACE_TOKEN_FILE" in str(raised.value)
    assert own_code(environ, listen, has_token=True).is_trusted


@pytest.mark.parametrize("value", ["on", "1", "Trusted", "isolated", "trusted "])
def test_an_unknown_value_is_refused_with_those_that_there_are(value: str) -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_OWN_CODE=.*use off or trusted"):
        own_code({"MILLRACE_OWN_CODE": value}, LOOPBACK, has_token=True)


def test_where_it_is_off_callers_code_is_refused_with_the_remedy() -> None:
    with pytest.raises(FailedPrecondition, match="MILLRACE_OWN_CODE=trusted") as raised:
        OwnCode().require_own_code()
    assert raised.value.specific_reason == "OWN_CODE_OFF"
    assert raised.value.metadata == {"variable": "MILLRACE_OWN_CODE", "value": "trusted"}


def test_where_it_is_trusted_callers_code_passes() -> None:
    OwnCode(is_trusted=True).require_own_code()
