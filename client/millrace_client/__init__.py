"""Millrace's client: raw data to a served model, over gRPC.

The client needs neither Ray nor torch.

    import millrace_client

    millrace = millrace_client.connect()
    table = millrace.data.read_table("datasets/digits/versions/v1", split="test")
    answer = millrace.inference.infer("digits", {"image": images})

Every public name is listed here. Its module is imported on first use, so that `millrace --help` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace_client.calls import Addresses, Operation
    from millrace_client.connection import Millrace, connect
    from millrace_client.errors import MillraceError
    from millrace_client.inference import autoscaling, keep_all, keep_latest, keep_named
    from millrace_client.specs import (
        append_to,
        arrow_source,
        asha,
        choice,
        column_split,
        csv_source,
        grid,
        hash_split,
        hold_out,
        idx_source,
        image_folder_source,
        image_tar_source,
        import_spec,
        integers,
        json_lines_source,
        log_uniform,
        name_map,
        optimizer,
        parquet_source,
        program_spec,
        quarantine,
        ratio_split,
        replacing,
        retention,
        sweep_spec,
        time_split,
        training_spec,
        uniform,
    )
    from millrace_client.steps import normalize, to_float

_HOMES = {
    "Addresses": "calls",
    "Millrace": "connection",
    "MillraceError": "errors",
    "Operation": "calls",
    "append_to": "specs",
    "arrow_source": "specs",
    "asha": "specs",
    "autoscaling": "inference",
    "choice": "specs",
    "column_split": "specs",
    "connect": "connection",
    "csv_source": "specs",
    "grid": "specs",
    "hash_split": "specs",
    "hold_out": "specs",
    "idx_source": "specs",
    "image_folder_source": "specs",
    "image_tar_source": "specs",
    "import_spec": "specs",
    "integers": "specs",
    "json_lines_source": "specs",
    "keep_all": "inference",
    "keep_latest": "inference",
    "keep_named": "inference",
    "log_uniform": "specs",
    "name_map": "specs",
    "normalize": "steps",
    "optimizer": "specs",
    "parquet_source": "specs",
    "own_model": "specs",
    "program_spec": "specs",
    "quarantine": "specs",
    "ratio_split": "specs",
    "replacing": "specs",
    "retention": "specs",
    "sweep_spec": "specs",
    "time_split": "specs",
    "to_float": "steps",
    "training_spec": "specs",
    "uniform": "specs",
}

__all__ = [
    "Addresses",
    "Millrace",
    "MillraceError",
    "Operation",
    "append_to",
    "arrow_source",
    "asha",
    "autoscaling",
    "choice",
    "column_split",
    "connect",
    "csv_source",
    "grid",
    "hash_split",
    "hold_out",
    "idx_source",
    "image_folder_source",
    "image_tar_source",
    "import_spec",
    "integers",
    "json_lines_source",
    "keep_all",
    "keep_latest",
    "keep_named",
    "log_uniform",
    "name_map",
    "normalize",
    "optimizer",
    "own_model",
    "parquet_source",
    "program_spec",
    "quarantine",
    "ratio_split",
    "replacing",
    "retention",
    "sweep_spec",
    "time_split",
    "to_float",
    "training_spec",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
