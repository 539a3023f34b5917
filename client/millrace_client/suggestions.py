"""A specification from nothing but a version: asked for, prepared where steps must learn first, and asked for again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2
from millrace_client.calls import new_request_id
from millrace_client.errors import NotFound
from millrace_client.operations import Operation
from millrace_client.specs import ratio_split

if TYPE_CHECKING:
    from millrace_client.data import DataClient

Making = Operation[data_pb2.DatasetVersion]
Ask = Callable[[str, resources_pb2.TrainingSpec | None], suggestion_pb2.SuggestTrainingSpecResponse]
DONE_WITHIN_S = 3600.0


@dataclass(frozen=True)
class Suggestion:
    """`spec` is complete where `preparation` is None. `choices` say what was chosen and why, `version` is the version
    that `spec` trains on: the one asked about, or the prepared one."""

    spec: resources_pb2.TrainingSpec
    choices: Sequence[suggestion_pb2.Choice]
    preparation: suggestion_pb2.Preparation | None
    version: str


def suggestion_of(answer: suggestion_pb2.SuggestTrainingSpecResponse) -> Suggestion:
    preparation = answer.preparation if answer.HasField("preparation") else None
    return Suggestion(answer.spec, list(answer.choices), preparation, answer.spec.dataset_version)


def prepare(
    data: DataClient, preparation: suggestion_pb2.Preparation, wait: Callable[[Making], data_pb2.DatasetVersion]
) -> str:
    """The name of the prepared version. It is made once, whoever asks; one that was deleted or ended without a result
    since is made anew. `wait` waits for what makes it. Raises what it fails with."""
    try:
        operation = begin_preparation(data, preparation, preparation.request_id)
        failed = operation.done and operation.proto.HasField("error")
    except NotFound:
        if not _is_there(data, preparation.source):
            raise
        failed = True
    if failed:
        operation = begin_preparation(data, preparation, new_request_id())
    return wait(operation).name


def begin_preparation(data: DataClient, preparation: suggestion_pb2.Preparation, request_id: str) -> Making:
    shares = {one.split: one.weight for one in preparation.splits}
    return data.transform_version(
        preparation.source,
        preparation.transform.steps,
        splits=ratio_split(shares, seed=preparation.split_seed) if shares else None,
        fit_split=preparation.fit_split,
        request_id=request_id,
    )


def prepared_suggestion(
    ask: Ask,
    data: DataClient,
    first: Suggestion,
    wait: Callable[[Making], data_pb2.DatasetVersion] = lambda operation: operation.wait(DONE_WITHIN_S),
) -> Suggestion:
    """What the rules say of the version that `first.preparation` makes, with the choices of both answers."""
    if first.preparation is None:
        return first
    version = prepare(data, first.preparation, wait)
    second = suggestion_of(ask(version, first.spec))
    return Suggestion(second.spec, [*first.choices, *second.choices], second.preparation, version)


def given_spec(spec: resources_pb2.TrainingSpec | None, overrides: dict[str, Any]) -> resources_pb2.TrainingSpec:
    """The fields of `spec`, and over them those that are named."""
    given = resources_pb2.TrainingSpec()
    if spec is not None:
        given.CopyFrom(spec)
    given.MergeFrom(resources_pb2.TrainingSpec(**overrides))
    return given


def _is_there(data: DataClient, version: str) -> bool:
    try:
        data.get_version(version)
    except NotFound:
        return False
    return True
