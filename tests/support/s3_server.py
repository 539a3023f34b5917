"""The S3 server that tests run against, started by themselves: MinIO if it is installed, else versitygw.

Both are the real thing; `make s3` installs one of them. What the environment demands is never silently skipped:

    MILLRACE_REQUIRE_MINIO=1   without MinIO, tests on s3:// fail, whatever other server is there
    MILLRACE_REQUIRE_S3=1      without any server, they fail
    neither                    without any server, they are skipped
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shared.settings import StoreSettings
from tests.support.needs import Missing, demanded
from tests.support.ports import free_ports

REPOSITORY = Path(__file__).parents[2]
HOST = "127.0.0.1"
ACCESS_KEY = "millrace-test"
SECRET_KEY = "millrace-test-secret"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class NoS3Server(Missing):
    """No S3 server can be had."""


@dataclass(frozen=True)
class S3Program:
    # "minio" or "versitygw": part of the tests' ids
    name: str
    path: Path

    def command(self, address: str, folder: Path) -> list[str]:
        if self.name == "minio":
            return [str(self.path), "server", str(folder), "--quiet", "--address", address]
        # Without --keep-alive: a kept connection answers every tenth small PUT of Arrow's client with 400.
        options = ["--quiet", "--health", self.health_path, "--port", address]
        return [str(self.path), *options, "posix", str(folder)]

    @property
    def health_path(self) -> str:
        return "/minio/health/live" if self.name == "minio" else "/health"

    @property
    def environment(self) -> dict[str, str]:
        if self.name == "minio":
            return {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY, "MINIO_BROWSER": "off"}
        return {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server."""

    name: str
    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)

    def settings(self, url: str) -> StoreSettings:
        """Of the store `s3://bucket/prefix` on this server; the bucket need not exist yet."""
        return StoreSettings(
            url=url,
            s3_endpoint=self.endpoint,
            s3_access_key=self.access_key,
            s3_secret_key=self.secret_key,
            public_s3_endpoint=self.endpoint,
        )


def name_under_test(environ: Mapping[str, str] = os.environ) -> str:
    """For the tests' ids; where no server is there, the one that is missing."""
    try:
        return find_program(environ).name
    except NoS3Server:
        return "minio"


def find_program(environ: Mapping[str, str] = os.environ) -> S3Program:
    """Raise `NoS3Server`."""
    folder = REPOSITORY / (environ.get("MILLRACE_CACHE") or ".cache") / "bin"
    minio = Path(environ.get("MILLRACE_MINIO") or folder / "minio")
    if os.access(minio, os.X_OK):
        return S3Program("minio", minio)
    if demanded("MILLRACE_REQUIRE_MINIO", environ):
        text = f"{minio} is no program: run `make minio`, or set MILLRACE_MINIO to one"
        raise NoS3Server(text, "MILLRACE_REQUIRE_MINIO", environ)
    if os.access(folder / "versitygw", os.X_OK):
        return S3Program("versitygw", folder / "versitygw")
    text = f"no S3 server in {folder}: run `make s3`, or set MILLRACE_MINIO to a minio program"
    raise NoS3Server(text, "MILLRACE_REQUIRE_S3", environ)


@contextmanager
def running(program: S3Program, folder: Path) -> Iterator[S3Server]:
    """Start the server on a free loopback port, keeping its data in `folder`, and stop it at the end."""
    data = folder / "data"
    data.mkdir()
    with (folder / "server.log").open("ab") as log:
        address, process = _start(program, data, log.fileno())
        try:
            yield S3Server(name=program.name, endpoint=f"http://{address}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(program: S3Program, data: Path, log: int) -> tuple[str, subprocess.Popen[bytes]]:
    # Between our finding a port free and the server taking it, another may: then the server ends, and we try again.
    for _attempt in range(3):
        address = f"{HOST}:{free_ports(1)[0]}"
        process = subprocess.Popen(
            program.command(address, data),
            env={**os.environ, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(f"http://{address}{program.health_path}"):
                return address, process
            time.sleep(0.05)
        process.kill()
        process.wait()
    said = (data.parent / "server.log").read_text(errors="replace")
    raise RuntimeError(f"{program.path} did not start:\n{said}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False
