"""Node.js and the packages of its test client, each pinned; installed once below MILLRACE_CACHE.

MILLRACE_REQUIRE_NODE=1   without Node.js or its packages, tests that need them fail
otherwise                 they are skipped
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.support.needs import Missing
from tests.support.s3_server import REPOSITORY

PACKAGES = {"@grpc/grpc-js": "1.14.7", "@grpc/proto-loader": "0.8.1", "apache-arrow": "21.2.0"}
INSTALL_TIMEOUT_S = 180
REQUIRED = "MILLRACE_REQUIRE_NODE"


def installed_packages(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder `node_modules` with the pinned packages. Raises `Missing`."""
    for program in ("node", "npm"):
        if shutil.which(program, path=environ.get("PATH")) is None:
            raise Missing(f"no {program} on the PATH: install Node.js 18 or newer", REQUIRED, environ)
    cache = REPOSITORY / (environ.get("MILLRACE_CACHE") or ".cache")
    pins = [f"{name}@{version}" for name, version in PACKAGES.items()]
    folder = cache / ("node-" + "-".join(f"{name.rsplit('/', 1)[-1]}-{version}" for name, version in PACKAGES.items()))
    if not folder.is_dir():
        _install(pins, folder, environ)
    return folder / "node_modules"


def proto_path(folder: Path) -> str:
    """The include folders for our protos, joined by ':'; `folder` takes the file that lies under another name.

    googleapis-common-protos keeps operations.proto as operations_proto.proto.
    """
    packages = Path(sysconfig.get_path("purelib"))
    mapped = folder / "google" / "longrunning"
    mapped.mkdir(parents=True)
    shutil.copy(packages / "google" / "longrunning" / "operations_proto.proto", mapped / "operations.proto")
    return ":".join(map(str, (REPOSITORY / "protos", folder, packages)))


def _install(pins: list[str], folder: Path, environ: Mapping[str, str]) -> None:
    # Under another name until it is whole; whoever comes second finds the first one's, or puts the same in its place.
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    making.mkdir(parents=True)
    options = ["--silent", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--prefix", str(making)]
    try:
        ended = subprocess.run(
            ["npm", "install", *options, *pins],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        if ended.returncode:
            raise Missing(f"npm install {' '.join(pins)} failed: {ended.stderr or ended.stdout}", REQUIRED, environ)
        if not folder.is_dir():
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
