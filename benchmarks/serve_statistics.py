"""The service's own statistics of a period: its batches, and the stages of its requests."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from millrace_client.calls import open_channel

# The fields of ModelStatistics, in nanoseconds; `success` is the whole request in the frontend.
PARTS = ("success", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Stretch:
    """The statistics of a period.

    `batches` counts batches by size. `mean_ms` has the mean of each of `PARTS` for a request. `batch_ms` has the round
    trip of a batch to a replica, and within it the preprocessing and the model.
    """

    batches: Mapping[int, int]
    mean_ms: Mapping[str, float]
    batch_ms: Mapping[str, float]

    @property
    def rows_per_batch(self) -> float:
        return sum(size * count for size, count in self.batches.items()) / sum(self.batches.values())


class ServiceStatistics:
    """Reads the statistics of one model; `stretch` returns the change since the last read."""

    def __init__(self, address: str, metrics: str, model: str) -> None:
        self._address = address
        self._metrics = metrics
        self._model = model
        self._before = self._read()

    def stretch(self) -> Stretch:
        before, self._before = self._before, self._read()
        added = {name: value - before.get(name, 0.0) for name, value in self._before.items()}
        batches = {int(name.removeprefix("size ")): round(n) for name, n in added.items() if name.startswith("size ")}
        requests, count = added["success count"], sum(batches.values())
        compute_ms = {part: added[f"batch {part}"] / count / 1e6 for part in ("input", "infer")}
        return Stretch(
            {size: n for size, n in batches.items() if n},
            {part: added[part] / requests / 1e6 for part in PARTS},
            {"round_trip": added["round trip s"] / count * 1000, **compute_ms},
        )

    def _read(self) -> dict[str, float]:
        with open_channel(self._address) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            (one,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=self._model), timeout=10.0).model_stats
        found: dict[str, float] = {part: getattr(one.inference_stats, part).ns for part in PARTS}
        found["success count"] = one.inference_stats.success.count
        for batch in one.batch_stats:
            found[f"size {batch.batch_size}"] = batch.compute_infer.count
        for part in ("input", "infer"):
            found[f"batch {part}"] = sum(getattr(batch, f"compute_{part}").ns for batch in one.batch_stats)
        found["round trip s"] = metric(self._metrics, "millrace_inference_batch_seconds_sum", self._model)
        return found


def metric(address: str, name: str, model: str) -> float:
    """Return the metric of that model at host:port, summed over its versions."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [line for line in lines if line.startswith(f"{name}{{") and f'model="{model}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in wanted)
