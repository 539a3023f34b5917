"""Millrace's client: raw data to a served model, over gRPC. It needs neither Ray nor torch.

    import millrace_client

    millrace = millrace_client.connect()
    table = millrace.data.read_table("datasets/digits/versions/v1", split="test")
    answer = millrace.inference.infer("digits", {"image": images})

Everything public is named here. It is imported when it is first used, so that `millrace --help` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace_client.addresses import Addresses
    from millrace_client.connection import Millrace, connect
    from millrace_client.errors import MillraceError
    from millrace_client.operations import Operation
    from millrace_client.specs import (
        hold_out,
        idx_source,
        normalize,
        optimizer,
        parquet_source,
        to_float,
        training_spec,
    )

_HOMES = {
    "Addresses": "addresses",
    "Millrace": "connection",
    "MillraceError": "errors",
    "Operation": "operations",
    "connect": "connection",
    "hold_out": "specs",
    "idx_source": "specs",
    "normalize": "specs",
    "optimizer": "specs",
    "parquet_source": "specs",
    "to_float": "specs",
    "training_spec": "specs",
}

__all__ = [
    "Addresses",
    "Millrace",
    "MillraceError",
    "Operation",
    "connect",
    "hold_out",
    "idx_source",
    "normalize",
    "optimizer",
    "parquet_source",
    "to_float",
    "training_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
