"""Between the messages of SuggestTrainingSpec and the rules' plain values."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from millrace.train.v1 import resources_pb2, suggestion_pb2
from shared.errors import invalid_field
from train_service.domain.suggestion import Preparation, Suggestion


def given_from_proto(spec: resources_pb2.TrainingSpec) -> dict[str, Any]:
    """The fields that are set, as JSON. Raises `InvalidArgument` for what JSON does not hold."""
    try:
        given: dict[str, Any] = json_format.MessageToDict(spec, preserving_proto_field_name=True)
    except (ValueError, json_format.Error) as error:
        raise invalid_field("spec", "a number", f"use finite numbers in its kwargs: {error}") from None
    given.pop("dataset_version", None)
    return given


def suggestion_to_proto(suggestion: Suggestion) -> suggestion_pb2.SuggestTrainingSpecResponse:
    response = suggestion_pb2.SuggestTrainingSpecResponse(
        choices=[
            suggestion_pb2.Choice(field=one.field, value=one.value, reason=one.reason) for one in suggestion.choices
        ],
        preparation=_preparation(suggestion.preparation) if suggestion.preparation else None,
    )
    json_format.ParseDict(suggestion.spec, response.spec)
    return response


def _preparation(preparation: Preparation) -> suggestion_pb2.Preparation:
    message = suggestion_pb2.Preparation(
        source=preparation.source,
        splits=[suggestion_pb2.SplitShare(split=split, weight=weight) for split, weight in preparation.shares.items()],
        split_seed=preparation.seed if preparation.shares else 0,
        fit_split=preparation.fit_split,
        request_id=preparation.request_id,
    )
    json_format.ParseDict({"steps": preparation.steps}, message.transform)
    return message
