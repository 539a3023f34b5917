"""The result of `make bench-serve`: the figures, and the bars that they meet."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

BARS = {
    "throughput_vs_ray_serve": (4.0, "at least"),
    "throughput_vs_mlserver": (3.0, "at least"),
    "share_of_model_limit": (0.6, "at least"),
    "p50_vs_model": (2.0, "at most"),
    "late_share": (0.001, "at most"),
    "refusal_p99_ms": (50.0, "at most"),
    "goodput_share": (0.85, "at least"),
    "late_share_at_4x": (0.001, "at most"),
    "refusal_p99_ms_at_4x": (50.0, "at most"),
    "goodput_share_at_4x": (0.85, "at least"),
    "swap_errors": (0, "at most"),
}


def report(figures: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result as one JSON object.

    Bars of parts that were not run are listed, but neither met nor missed.
    """
    met = {
        name: figures[name] >= bar if sense == "at least" else figures[name] <= bar
        for name, (bar, sense) in BARS.items()
        if name in figures
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "ray", "grpcio")}
    return {
        **figures,
        "bars": {name: f"{sense} {bar}" for name, (bar, sense) in BARS.items()},
        "met": met,
        **given,
        "machine": {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            **versions,
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
    }


def spread(values: Sequence[float]) -> list[float]:
    return [round(min(values), 2), round(max(values), 2)]
