from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from data_service.settings import DEFAULT_LISTEN, data_settings
from shared.settings import SettingsError

STORE = {"MILLRACE_STORE": "file:///tmp/store"}


def test_no_file_is_imported_unless_roots_are_named() -> None:
    settings = data_settings(STORE)
    assert settings.import_roots == ()
    assert settings.service.listen == DEFAULT_LISTEN


def test_roots_are_separated_as_in_path() -> None:
    settings = data_settings({**STORE, "MILLRACE_IMPORT_ROOTS": "/a:/b/c:"})
    assert settings.import_roots == (PurePosixPath("/a"), PurePosixPath("/b/c"))


@pytest.mark.parametrize("roots", ["relative", "/a/../b", "/a:b"])
def test_a_root_that_is_not_absolute_is_refused(roots: str) -> None:
    with pytest.raises(SettingsError, match="MILLRACE_IMPORT_ROOTS"):
        data_settings({**STORE, "MILLRACE_IMPORT_ROOTS": roots})
