"""The client stays light: no Ray, no torch, and heavy modules only where they are used."""

from __future__ import annotations

import subprocess
import sys

import millrace_client

HEAVY = ("ray", "torch", "torchvision", "obstore", "minio", "sklearn")
# What both sides share: the packing of code, and the names of headers.
SHARED = {"shared", "shared.code_packing", "shared.errors", "shared.names"}
LATER = ("grpc", "numpy", "pyarrow", "matplotlib", "rich")

IMPORT_ALL = """
import importlib, pkgutil, sys
import millrace_client
for module in pkgutil.walk_packages(millrace_client.__path__, "millrace_client."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sys.modules)
"""


def python(*arguments: str) -> str:
    return subprocess.run((sys.executable, *arguments), capture_output=True, text=True, check=True).stdout


def test_no_module_of_the_client_imports_ray_torch_or_a_service() -> None:
    modules = python("-c", IMPORT_ALL).split()
    loaded = {name.partition(".")[0] for name in modules}
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in modules if name.partition(".")[0] == "shared"} == SHARED
    assert loaded.isdisjoint({"data_service", "train_service", "inference_service"})


def test_every_name_that_the_package_offers_exists() -> None:
    assert all(getattr(millrace_client, name) for name in millrace_client.__all__)


def test_connecting_needs_neither_pyarrow_nor_matplotlib() -> None:
    code = "import millrace_client, sys; millrace_client.connect(); print(*sys.modules)"
    assert {"pyarrow", "matplotlib", "rich"}.isdisjoint(python("-c", code).split())


def test_help_imports_nothing_that_it_does_not_need() -> None:
    code = (
        "import sys; from millrace_client.cli import millrace\n"
        "millrace(['--help'], standalone_mode=False); print(*sys.modules)"
    )
    assert set(LATER).isdisjoint(python("-c", code).split())
