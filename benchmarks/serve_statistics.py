"""What the service itself says of a stretch of time: its batches, and where its requests spent their time."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from millrace_client.calls import open_channel

# Of ModelStatistics, in nanoseconds; `success` is the whole request in the front.
PARTS = ("success", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Stretch:
    """`batches`: how many of each size. `mean_ms` of each of `PARTS` is a request's; `batch_ms` a batch's: the round
    trip to a replica, and of it the preprocessing and the model."""

    batches: Mapping[int, int]
    mean_ms: Mapping[str, float]
    batch_ms: Mapping[str, float]

    @property
    def rows_per_batch(self) -> float:
        return sum(size * count for size, count in self.batches.items()) / sum(self.batches.values())


class ServiceStatistics:
    """Reads the statistics of one model; `stretch` tells what was added since they were read the last time."""

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
    """What Prometheus reads at host:port of that model, its versions added up."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [line for line in lines if line.startswith(f"{name}{{") and f'model="{model}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in wanted)
