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


def test_custom_transforms_are_refused_unless_they_are_named() -> None:
    assert data_settings(STORE).custom_transforms == frozenset()
    named = data_settings({**STORE, "MILLRACE_CUSTOM_TRANSFORMS": "a.b:f, c:g"})
    assert named.custom_transforms == {"a.b:f", "c:g"}


@pytest.mark.parametrize("functions", ["a.b", "a:b:c", "a b:c", ":f", "os:system()"])
def test_a_custom_transform_that_is_no_function_is_refused(functions: str) -> None:
    with pytest.raises(SettingsError, match="MILLRACE_CUSTOM_TRANSFORMS"):
        data_settings({**STORE, "MILLRACE_CUSTOM_TRANSFORMS": functions})


@pytest.mark.parametrize("seconds", ["0", "-1", "often", "nan", "1e9"])
def test_a_sweep_interval_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(SettingsError, match="MILLRACE_SWEEP_INTERVAL_S"):
        data_settings({**STORE, "MILLRACE_SWEEP_INTERVAL_S": seconds})
