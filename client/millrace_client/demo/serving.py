"""The test split through the served model: what it answered, how well and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.common.v1.lineage_pb2 import Lineage
from millrace_client.connection import Millrace
from millrace_client.data import image_rows

IN_FLIGHT = 64


@dataclass(frozen=True, kw_only=True)
class Served:
    """N images of shape (N, H, W) with what they show, what the model answered, and how long each answer took."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    predictions: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    latencies_s: npt.NDArray[np.float64]
    wall_s: float
    lineage: Lineage

    @property
    def accuracy(self) -> float:
        return float((self.predictions == self.labels).mean())

    @property
    def requests_per_second(self) -> float:
        return len(self.labels) / self.wall_s

    def latency_ms(self, percentile: float) -> float:
        return float(np.percentile(self.latencies_s, percentile) * 1000)


def classify_split(
    millrace: Millrace,
    model: str,
    version: str,
    split: str = "test",
    *,
    in_flight: int = IN_FLIGHT,
    on_answer: Callable[[int, int], object] | None = None,
) -> Served:
    """Sends each raw image of a split as a request of its own; `on_answer` is told how many of how many are back."""
    images, labels = image_rows(millrace.data.read_table(version, split=split))
    assert labels is not None, "a version from IDX files has labels"
    started = time.perf_counter()
    answers = []
    for answer in millrace.inference.infer_many(
        model, ({"image": image[None]} for image in images), in_flight=in_flight
    ):
        answers.append(answer)
        if on_answer is not None:
            on_answer(len(answers), len(images))
    wall_s = time.perf_counter() - started
    return Served(
        images=images,
        labels=labels,
        predictions=np.array([answer.outputs["label"][0] for answer in answers], np.int64),
        probabilities=np.array([answer.outputs["probabilities"].max() for answer in answers], np.float64),
        latencies_s=np.array([answer.latency_s for answer in answers], np.float64),
        wall_s=wall_s,
        lineage=answers[-1].lineage,
    )
