"""Exports the models' statistics to Prometheus over HTTP: the same numbers as ModelStatistics."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_service.domain.statistics import OK, Histogram, Statistics
from inference_service.serve.models import Listed, Models
from shared.settings import SettingsError

PORT_REFUSED = (errno.EADDRINUSE, errno.EACCES)
PREFIX = "millrace_inference"
LABELS = ("model", "version")
DURATIONS: dict[str, tuple[str, Callable[[Statistics], Histogram]]] = {
    "request_seconds": ("answered requests, in all", lambda one: one.requests.get(OK) or Histogram()),
    "queue_seconds": ("answered requests, without the computing", lambda one: one.queue),
    "compute_input_seconds": ("answered requests: preprocessing", lambda one: one.computing.input),
    "compute_infer_seconds": ("answered requests: the model", lambda one: one.computing.infer),
    "compute_output_seconds": ("answered requests: making the answer", lambda one: one.computing.output),
    "batch_seconds": ("batches, to a replica and back", lambda one: one.batch_round_trip),
    "batch_rows": ("rows in a batch", lambda one: one.batch_rows),
}


class ModelCollector(Collector):
    """Collects the present numbers on each scrape, from any thread.

    It keeps no counters of its own.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        listed = list(self._models.listed())
        requests = CounterMetricFamily(f"{PREFIX}_requests", "requests by how they ended", labels=(*LABELS, "status"))
        # Requests without a version: no such model, or it is not READY.
        for status, histogram in list(self._models.unchosen.requests.items()):
            requests.add_metric(("", "", status), histogram.count)
        for one in listed:
            for status, histogram in list(one.statistics.requests.items()):
                requests.add_metric((*_labels(one), status), histogram.count)
        yield requests
        shadowed = CounterMetricFamily(
            f"{PREFIX}_shadow_requests",
            "copies for a shadow by how they ended; SHED: left out",
            labels=(*LABELS, "status"),
        )
        for one in listed:
            for status, count in list(one.statistics.shadowed.items()):
                shadowed.add_metric((*_labels(one), status), count)
        yield shadowed
        non_finite = CounterMetricFamily(
            f"{PREFIX}_non_finite_rows", "rows answered with a NaN or an infinity", labels=LABELS
        )
        for one in listed:
            non_finite.add_metric(_labels(one), one.statistics.non_finite_rows)
        yield non_finite
        for name, (text, histogram_of) in DURATIONS.items():
            family = HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=LABELS)
            for one in listed:
                _add(family, _labels(one), histogram_of(one.statistics))
            yield family
        rows = GaugeMetricFamily(f"{PREFIX}_queued_rows", "rows that wait for the model", labels=LABELS)
        ready = GaugeMetricFamily(f"{PREFIX}_ready", "1: requests are answered", labels=LABELS)
        replicas = GaugeMetricFamily(f"{PREFIX}_replicas", "replicas that run", labels=LABELS)
        for one in listed:
            replicas.add_metric(_labels(one), one.replicas or 0)
            rows.add_metric(_labels(one), one.queued_rows)
            ready.add_metric(_labels(one), int(one.answers))
        yield rows
        yield ready
        yield replicas


@contextmanager
def metrics_served(listen: str, models: Models) -> Iterator[None]:
    """Serves http://`listen`/metrics within the block; nothing if `listen` is empty.

    Raises `SettingsError` if the port or the address is not available.
    """
    if not listen:
        yield
        return
    host, _, port = listen.rpartition(":")
    registry = CollectorRegistry()
    registry.register(ModelCollector(models))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        remedy = "use another port" if error.errno in PORT_REFUSED else "use an address of this machine"
        raise SettingsError(f"MILLRACE_METRICS_LISTEN={listen!r}: {error.strerror}; {remedy}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _labels(listed: Listed) -> tuple[str, str]:
    return listed.deployment.model_name, listed.version.number


def _add(family: HistogramMetricFamily, labels: tuple[str, str], histogram: Histogram) -> None:
    counts = list(accumulate(histogram.counts))
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.sum)
