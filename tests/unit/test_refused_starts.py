"""No service starts where strangers could run code on its cluster, or with a token that others can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import data_service.__main__
import inference_service.__main__
import train_service.__main__

SERVICES: dict[str, Callable[[], int | None]] = {
    "data": data_service.__main__.main,
    "train": train_service.__main__.main,
    "inference": inference_service.__main__.main,
}


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MILLRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MILLRACE_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


def refusal(service: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):
        sys.exit(SERVICES[service]())
    return capsys.readouterr().err


@pytest.mark.parametrize("service", SERVICES)
def test_own_code_is_not_trusted_where_strangers_call(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MILLRACE_LISTEN", "0.0.0.0:50099")
    monkeypatch.setenv("MILLRACE_OWN_CODE", "trusted")

    text = refusal(service, capsys)

    assert text.startswith(
        f"{service}_service: MILLRACE_OWN_CODE=trusted: every client that reaches 0.0.0.0:50099 could run code"
    )
    assert "MILLRACE_TOKEN_FILE" in text
    assert not (tmp_path / "store").exists(), "it has touched nothing yet"


@pytest.mark.parametrize("service", SERVICES)
def test_a_token_that_others_can_read_is_none(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-tests")
    file.chmod(0o644)
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(file))

    assert f"{service}_service: MILLRACE_TOKEN_FILE={str(file)!r}" in refusal(service, capsys)
