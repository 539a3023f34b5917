"""Settings: what is missing or malformed is named by its variable, with the remedy; secrets are never shown."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from shared.settings import ServiceSettings, SettingsError, StoreSettings, service_settings, store_settings

S3 = {
    "MILLRACE_STORE": "s3://bucket/prefix",
    "MILLRACE_S3_ENDPOINT": "http://127.0.0.1:9000",
    "MILLRACE_S3_ACCESS_KEY": "someone",
    "MILLRACE_S3_SECRET_KEY": "their-secret",
}
FILE = {"MILLRACE_STORE": "file:///data/store"}
LISTEN = "127.0.0.1:50051"


def test_a_directory_needs_only_its_url() -> None:
    settings = service_settings(FILE, LISTEN)

    assert settings.store == StoreSettings(url="file:///data/store")
    assert (settings.listen, settings.ray_address, settings.log_level) == (LISTEN, "", "INFO")


def test_every_variable_is_read() -> None:
    environ = {
        **S3,
        "MILLRACE_STORE": "s3://bucket/prefix/",
        "MILLRACE_S3_REGION": "eu-west-1",
        "MILLRACE_PUBLIC_S3_ENDPOINT": "https://s3.example.org",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "MILLRACE_LISTEN": "0.0.0.0:7000",
        "MILLRACE_LOG_LEVEL": "debug",
    }

    assert service_settings(environ, LISTEN) == ServiceSettings(
        listen="0.0.0.0:7000",
        ray_address="10.0.0.1:6379",
        log_level="DEBUG",
        store=StoreSettings(
            url="s3://bucket/prefix",
            s3_endpoint="http://127.0.0.1:9000",
            s3_access_key="someone",
            s3_secret_key="their-secret",
            s3_region="eu-west-1",
            public_s3_endpoint="https://s3.example.org",
        ),
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MILLRACE_STORE", ""),
        ("MILLRACE_STORE", "/data/store"),
        ("MILLRACE_STORE", "file://"),
        ("MILLRACE_STORE", "file:///"),
        ("MILLRACE_STORE", "file://host/data"),
        ("MILLRACE_STORE", "file:relative"),
        ("MILLRACE_STORE", "s3://"),
        ("MILLRACE_STORE", "http://bucket/x"),
        ("MILLRACE_S3_SECRET_KEY", ""),
        ("MILLRACE_S3_ACCESS_KEY", ""),
        ("MILLRACE_S3_ENDPOINT", "127.0.0.1:9000"),
        ("MILLRACE_S3_ENDPOINT", "localhost"),
        ("MILLRACE_PUBLIC_S3_ENDPOINT", "localhost:9000"),
        ("MILLRACE_S3_ENDPOINT", "ftp://127.0.0.1:9000"),
        ("MILLRACE_S3_ENDPOINT", "http://"),
        ("MILLRACE_S3_ENDPOINT", "http://127.0.0.1:9000/path"),
        ("MILLRACE_LISTEN", "50051"),
        ("MILLRACE_LISTEN", ":50051"),
        ("MILLRACE_LISTEN", "127.0.0.1:"),
        ("MILLRACE_LISTEN", "127.0.0.1:70000"),
        ("MILLRACE_LISTEN", "127.0.0.1:grpc"),
        ("MILLRACE_LISTEN", "127.0.0.1:²"),
        ("MILLRACE_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable) as refused:
        service_settings({**S3, variable: value}, LISTEN)

    assert "their-secret" not in str(refused.value)


def test_a_missing_store_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_STORE is not set: use file:///"):
        store_settings({})


def test_secrets_are_not_shown_wherever_settings_are_printed() -> None:
    settings = service_settings(S3, LISTEN)

    for text in (repr(settings), str(settings), repr(settings.store), f"{settings.store}"):
        assert "their-secret" not in text
        assert "someone" not in text


def test_settings_are_frozen_and_travel_by_pickle() -> None:
    settings = store_settings(S3)

    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.url = "file:///other"  # type: ignore[misc]
