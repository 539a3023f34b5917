"""A specification of several inputs: what follows from the version and the code, and what is refused by its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millrace.train.v1 import resources_pb2 as res
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.own_models import own
from tests.support.own_steps import of_the_page
from tests.support.several_inputs import CLASSES, INPUTS, asked, base, commit_rows
from tests.support.transforming import commit_tables
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.spec import BY_DEVICE, FSDP, OWN, Acceleration, Placement, TrainingSpec
from train_service.jobs.own_code import ProgramCheck
from train_service.jobs.training_jobs import TrainingJobs

pytestmark = pytest.mark.usefixtures("checked_here")


@pytest.fixture
def jobs(store: ObjectStore) -> TrainingJobs:
    commit_rows(store)
    return TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))


def refusals(jobs: TrainingJobs, spec: TrainingSpec) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as refused:
        jobs.checked(spec)
    return {str(path): str(text) for path, text in refused.value.fields}


def test_the_model_is_tried_with_a_tensor_for_each_input(jobs: TrainingJobs, store: ObjectStore) -> None:
    found = jobs.checked(asked(store))

    assert (found.model.in_channels, found.model.num_classes) == (0, CLASSES)
    assert (found.input_columns, found.loss.name) == (INPUTS, "cross_entropy")
    assert jobs.checked(found) == found


def test_a_training_step_on_several_inputs_is_taken(jobs: TrainingJobs, store: ObjectStore) -> None:
    found = jobs.checked(asked(store, "net:Trained"))

    assert (found.model.is_step, found.model.num_classes, found.loss.name) == (True, CLASSES, OWN)


def test_a_model_of_several_inputs_that_fsdp_can_shard_is_taken(jobs: TrainingJobs, store: ObjectStore) -> None:
    spec = replace(asked(store, num_workers=2), placement=Placement(parallel=FSDP))

    try:
        assert jobs.checked(spec).placement.parallel == FSDP
    finally:
        import torch.distributed as dist

        if dist.is_initialized():  # the child would end with it
            dist.destroy_process_group()


def test_an_input_that_the_model_does_not_take_is_named_with_what_it_gets(
    jobs: TrainingJobs, store: ObjectStore
) -> None:
    found = refusals(jobs, replace(asked(store), input_columns=("image", "age")))

    (text,) = found.values()
    assert list(found) == ["spec.model.entry"]
    assert "one dict of inputs with 'image' float32 (2, 1, 6, 6), 'age' float32 (2,)" in text
    assert "KeyError: 'tokens'" in text


@pytest.mark.parametrize(
    ("path", "said", "change"),
    [
        ("input_columns", "name each column once", {"input_columns": ("age", "image", "age")}),
        ("input_columns", "one has no name", {"input_columns": ("age", "")}),
        ("input_columns", "use at most 64", {"input_columns": tuple(f"c{number}" for number in range(65))}),
        ("input_columns", "use at most 64", {"input_columns": tuple(map(str, range(100_000)))}),
        ("input_columns[1]", "no step makes it", {"input_columns": ("age", "absent")}),
        (
            "input_columns[1]",
            "it is string; an input is a number, a flag or a tensor of a fixed shape",
            {
                "input_columns": ("image", "age"),
                "transform": {"steps": [{"column": "age", "cast": {"arrowType": "string"}}]},
            },
        ),
        ("transform", "takes the input column away", {"transform": {"steps": [{"drop": {"columns": ["age"]}}]}}),
        ("acceleration.channels_last", "leave it out", {"acceleration": Acceleration(channels_last=True)}),
        ("acceleration.transform_device", "leave it out", {"acceleration": Acceleration(transform_device=BY_DEVICE)}),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_their_field(
    jobs: TrainingJobs, store: ObjectStore, path: str, said: str, change: dict[str, Any]
) -> None:
    found = refusals(jobs, asked(store, **change))

    assert said in found[f"spec.{path}"]


def test_only_a_model_of_ones_own_takes_several_inputs(jobs: TrainingJobs, store: ObjectStore) -> None:
    mlp = ModelSpec(builder="mlp", in_channels=6, num_classes=CLASSES)
    spec = asked(store)

    assert set(refusals(jobs, base(model=mlp))) == {"spec.input_columns", "spec.model.in_channels"}
    assert "spec.model.in_channels" in refusals(jobs, replace(spec, model=replace(spec.model, in_channels=1)))


def test_a_client_names_either_one_column_or_several() -> None:
    model = res.Model(entry="net:Four", code_bundle="codeBundles/x")
    message = res.TrainingSpec(model=model, input_columns=INPUTS, epochs=1, global_batch_size=2)
    spec = spec_from_proto(message, ())
    assert (spec.input_column, spec.input_columns) == ("", INPUTS)
    assert TrainingSpec.from_config(spec.as_config()) == spec
    assert list(spec_to_proto(spec).input_columns) == list(INPUTS)

    message.transform.steps.add().to_float.SetInParent()
    with pytest.raises(InvalidArgument) as unnamed:
        spec_from_proto(message, ())
    message.input_column = "image"
    with pytest.raises(InvalidArgument) as both:
        spec_from_proto(message, ())

    assert unnamed.value.fields[0][0] == "spec.transform.steps[0].column"
    assert both.value.fields[0][0] == "spec.input_column"


def test_the_model_of_the_page_takes_the_inputs_that_the_page_names(store: ObjectStore, jobs: TrainingJobs) -> None:
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (40, 28, 28), np.uint8)
    rows = pa.table(
        {
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "age": rng.integers(18, 90, 40),
            "smokes": rng.integers(0, 2, 40) == 1,
            "label": rng.integers(0, 3, 40),
        }
    )
    commit_tables(store, {"train": rows}, "datasets/patients/versions/v1")
    page = base(
        dataset_version="datasets/patients/versions/v1",
        validation_split="",
        input_columns=("image", "age", "smokes"),
    )

    found = jobs.checked(own(store, page, of_the_page("both.py"), "net:Both"))

    assert found.model.num_classes == 3
