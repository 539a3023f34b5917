"""ModelStatistics of a service: what its front processes have counted, added up.

Each leaves its own in the folder that they share, once a second; who is asked reads them there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inference import grpc_service_pb2 as pb
from inference_service.batching.models import Listed, Models
from inference_service.converters.repository import statistics_to_proto
from inference_service.domain.applications import application_name
from inference_service.domain.statistics import Statistics
from inference_service.fronts.siblings import Siblings

FILE = "statistics"


class SummedStatistics:
    """This process's as they are, those of the others as they left them last."""

    def __init__(self, models: Models, siblings: Siblings) -> None:
        self._models = models
        self._siblings = siblings
        # By application: what it left of it, and by how many requests and batches that was.
        self._left: dict[str, pb.ModelStatistics] = {}
        # None before the first time: what lies there then is by the process before this one.
        self._counted: dict[str, tuple[int, int]] | None = None

    def leave(self) -> None:
        """This process's own, for the others, where something was counted since it last did. Raises `OSError`."""
        now = {_application(one): one for one in self._models.listed() if one.statistics.requests}
        counted = {application: _counted(one.statistics) for application, one in now.items()}
        before = self._counted or {}
        changed = [application for application in now if counted[application] != before.get(application)]
        if self._counted is not None and not changed and len(counted) == len(before):
            return
        for application in changed:
            self._left[application] = statistics_to_proto(now[application])
            # A deployment that was deleted and made anew has the name of the one before.
            self._left[application].name = application
        self._left = {application: self._left[application] for application in now}
        own = pb.ModelStatisticsResponse(model_stats=self._left.values())
        self._siblings.leave(FILE, own.SerializeToString())
        self._counted = counted

    def of(self, model_name: str, model_version: str) -> list[pb.ModelStatistics]:
        """Of the versions that are meant, as `Models.listed_of`, which says what it raises."""
        found = self._models.listed_of(model_name, model_version)
        others = [
            {one.name: one for one in pb.ModelStatisticsResponse.FromString(data).model_stats}
            for data in self._siblings.left(FILE)
        ]
        return [self._sum(listed, (there.get(_application(listed)) for there in others)) for listed in found]

    def _sum(self, listed: Listed, others: Iterable[pb.ModelStatistics | None]) -> pb.ModelStatistics:
        total = statistics_to_proto(listed)
        for other in others:
            if other is not None:
                _add(total, other)
        return total


def _application(listed: Listed) -> str:
    return application_name(listed.deployment, listed.version)


def _counted(statistics: Statistics) -> tuple[int, int]:
    return sum(one.count for one in statistics.requests.values()), statistics.batch_rows.count


def _add(total: pb.ModelStatistics, other: pb.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, other.last_inference)
    total.inference_count += other.inference_count
    total.execution_count += other.execution_count
    _add_durations(total.inference_stats, other.inference_stats)
    batches = {one.batch_size: one for one in total.batch_stats}
    for batch in other.batch_stats:
        if batch.batch_size in batches:
            _add_durations(batches[batch.batch_size], batch)
        else:
            total.batch_stats.append(batch)
    total.batch_stats.sort(key=lambda one: one.batch_size)


def _add_durations(total: Any, other: Any) -> None:
    """Every `StatisticDuration` of two messages of one type."""
    for field, value in other.ListFields():
        if isinstance(value, pb.StatisticDuration):
            duration = getattr(total, field.name)
            duration.count += value.count
            duration.ns += value.ns
