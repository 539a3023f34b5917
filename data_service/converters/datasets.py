"""Datasets as messages, and what is asked of them as values."""

from __future__ import annotations

from decimal import Decimal

from google.protobuf.duration_pb2 import Duration

from data_service.converters.times import timestamp
from data_service.domain.dataset import Dataset, Retention
from millrace.data.v1 import resources_pb2

NANOS = 1_000_000_000


def dataset_message(found: Dataset) -> resources_pb2.Dataset:
    """A dataset that was only checked has neither uid nor etag."""
    message = resources_pb2.Dataset(
        name=found.name,
        uid=found.uid,
        display_name=found.display_name,
        description=found.description,
        create_time=timestamp(found.create_time) if found.uid else None,
        etag=found.etag if found.uid else "",
    )
    if not found.retention.keeps_all:
        message.retention.keep_newest = found.retention.keep_newest
        if found.retention.max_age_s:
            message.retention.max_age.CopyFrom(_duration(found.retention.max_age_s))
    return message


def retention_from(message: resources_pb2.Retention) -> Retention:
    age = message.max_age
    return Retention(keep_newest=message.keep_newest, max_age_s=age.seconds + age.nanos / 1e9)


def _duration(seconds: float) -> Duration:
    # By its digits: times a thousand million a float is another one, and a fraction may be rounded to a whole second.
    whole, nanos = divmod(round(Decimal(repr(seconds)) * NANOS), NANOS)
    return Duration(seconds=whole, nanos=nanos)
