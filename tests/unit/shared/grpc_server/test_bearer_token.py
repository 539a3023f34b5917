"""The file of a server's token: what is wrong with it is said with the variable, the file and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.grpc_server import BearerToken, bearer_token
from shared.settings import SettingsError

TOKEN = "0123456789abcdef"  # of 16 characters, the fewest


def token_file(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)
    return file


def read(file: Path) -> BearerToken | None:
    return bearer_token({"MILLRACE_TOKEN_FILE": str(file)})


def refusal(file: Path) -> str:
    with pytest.raises(SettingsError) as raised:
        read(file)
    assert str(raised.value).startswith(f"MILLRACE_TOKEN_FILE={str(file)!r}: the file ")
    return str(raised.value)


@pytest.mark.parametrize("environ", [{}, {"MILLRACE_TOKEN_FILE": ""}])
def test_without_the_variable_there_is_no_token(environ: dict[str, str]) -> None:
    assert bearer_token(environ) is None


@pytest.mark.parametrize("content", [TOKEN, f"{TOKEN}\n", f"\r\n \t{TOKEN} \r\n\n"])
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_white_space_around_the_token_is_left_out(tmp_path: Path, content: str, mode: int) -> None:
    token = read(token_file(tmp_path, content, mode))

    assert token is not None
    assert token.is_in([("authorization", f"Bearer {TOKEN}")])


def test_the_longest_token_is_taken_whole(tmp_path: Path) -> None:
    token = read(token_file(tmp_path, "x" * 1024))

    assert token is not None
    assert token.is_in([("authorization", "Bearer " + "x" * 1024)])
    assert not token.is_in([("authorization", "Bearer " + "x" * 1023)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; write a token into it"),
        (" \n\n", "is empty; write a token into it"),
        (TOKEN[:-1], "holds a token of 15 characters, which can be guessed; use at least 16"),
        ("x" * 1025, "holds more than 1024 characters; write one token"),
        (b"x" * 2**20, "holds more than 1024 characters; write one token"),
        (f"{TOKEN}\n{TOKEN}\n", "holds more than one token of visible ASCII characters; write one token, on one line"),
        (f"{TOKEN} {TOKEN}", "holds more than one token of visible ASCII characters; write one token, on one line"),
        (f"{TOKEN}ü", "holds more than one token of visible ASCII characters; write one token, on one line"),
        (TOKEN.encode() + b"\0", "holds more than one token of visible ASCII characters; write one token, on one line"),
    ],
)
def test_an_invalid_token_is_refused_and_not_shown(tmp_path: Path, content: str | bytes, said: str) -> None:
    text = refusal(token_file(tmp_path, content))

    assert said in text
    assert TOKEN[:-1] not in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o610, 0o644, 0o601])
def test_a_file_that_other_users_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = token_file(tmp_path, TOKEN, mode)
    text = refusal(file)

    assert f"may be read or changed by other users (mode {mode:04o}); run chmod 600 {file}" in text
    assert TOKEN not in text


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(token_file(tmp_path, TOKEN, 0o644))

    assert "mode 0644" in refusal(link)


def test_a_token_path_that_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)

    assert "is no regular file" in refusal(tmp_path / "pipe")
    assert "is no regular file" in refusal(tmp_path / "folder")
    assert "cannot be read: No such file or directory" in refusal(tmp_path / "nothing")


def test_a_token_does_not_show_itself(tmp_path: Path) -> None:
    token = read(token_file(tmp_path, TOKEN))

    assert TOKEN not in repr(token)
    assert TOKEN not in str(token)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", TOKEN)],
        [("authorization", f"Bearer{TOKEN}")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}ü")],
        [("authorization", f"Bearer {TOKEN},Bearer {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}".encode())],
        [("x-authorization", f"Bearer {TOKEN}")],
    ],
)
def test_other_headers_do_not_bring_it(metadata: list[tuple[str, str | bytes]]) -> None:
    assert not BearerToken(TOKEN).is_in(metadata)


def test_one_of_several_headers_is_enough() -> None:
    """A proxy may add one of its own."""
    metadata = [("authorization", "Basic dXNlcjpwdw=="), ("x-request-id", "r1"), ("authorization", f"Bearer {TOKEN}")]

    assert BearerToken(TOKEN).is_in(metadata)
