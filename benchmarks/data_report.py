"""The result of `make bench-data`: ratios of medians, and the bars that they meet."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
import ray

# Rows/s of each contender, run by run.
Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Ratio:
    """Ours over the fastest of the peers, by their medians."""

    ours: str
    peers: Sequence[str]
    at_least: float


RATIOS = {
    "ingest_vs_pyarrow": Ratio("ingest", ("pyarrow_write",), 0.5),
    "transform_vs_ray_row_map": Ratio("transform", ("ray_row_map",), 20.0),
    "transform_vs_ray_map_batches": Ratio("transform", ("ray_map_batches",), 1.0),
    "read_vs_pyarrow": Ratio("read", ("pyarrow_read", "pyarrow_read_together"), 0.7),
}
RSS_GROWTH_AT_MOST = 1.3
VERSION_SIZE_AT_MAX = 1.3


def report(
    rates: Rates, memory: Mapping[str, float], given: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the result as one JSON object.

    `memory` and `sizes` are empty, and ratios are missing, if they were not measured.
    """
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: medians[ratio.ours] / max(medians[peer] for peer in ratio.peers)
        for name, ratio in RATIOS.items()
        if ratio.ours in medians
    }
    met = {name: value >= RATIOS[name].at_least for name, value in ratios.items()}
    if memory:
        ratios["rss_growth"] = memory["rss_growth"]
        met["rss_growth"] = memory["rss_growth"] <= RSS_GROWTH_AT_MOST
    if sizes:
        ratios["version_size_vs_pyarrow"] = sizes["version"] / sizes["pyarrow"]
        met["version_size_vs_pyarrow"] = ratios["version_size_vs_pyarrow"] <= VERSION_SIZE_AT_MAX
    return {
        **{name: round(value, 3) for name, value in ratios.items()},
        **_without_bars(medians),
        "bars": {
            **{name: ratio.at_least for name, ratio in RATIOS.items()},
            "rss_growth": RSS_GROWTH_AT_MOST,
            "version_size_vs_pyarrow": VERSION_SIZE_AT_MAX,
        },
        "met": met,
        "rows_per_s": {name: round(value) for name, value in medians.items()},
        "spread_rows_per_s": {name: [round(min(values)), round(max(values))] for name, values in rates.items()},
        "size_bytes": dict(sizes or {}),
        "memory": {**memory, "measures": "sum of PSS of service, reconciler and busy Ray workers, every 50 ms"},
        "upload": "Arrow stream without compression, imported while it arrives; ingest_lz4 is the same with LZ4",
        **given,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, pyarrow {pyarrow.__version__}, ray {ray.__version__}",
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def _without_bars(medians: Mapping[str, float]) -> dict[str, float]:
    """Return ratios to the same peers with another form of input, which have no bars.

    pyarrow writes the same table that ours uploads, whose tensors it writes as lists; the tutorial's variant gets
    images as bytes instead of lists.
    """
    more = {
        "ingest_vs_pyarrow_as_it_is": ("ingest", "pyarrow_write_as_it_is"),
        "transform_vs_ray_row_map_of_bytes": ("transform", "ray_row_map_of_bytes"),
    }
    return {name: round(medians[ours] / medians[peer], 3) for name, (ours, peer) in more.items() if ours in medians}
