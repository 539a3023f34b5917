"""Steps and settings as options of `millrace data transform` and `millrace train create`: what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2, train_service_pb2_grpc
from millrace_client import specs, steps
from millrace_client.cli import millrace
from tests.support.grpc_answers import serving
from tests.unit.client.test_data_commands import VERSION, Recording
from tests.unit.client.test_data_commands import run as run_data

Spec = resources_pb2.TrainingSpec


class Creating(train_service_pb2_grpc.TrainServiceServicer):
    """Keeps the specifications that it is asked for."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []

    def SuggestTrainingSpec(  # noqa: N802
        self, request: Any, _context: Any
    ) -> suggestion_pb2.SuggestTrainingSpecResponse:
        """Nothing but what was given."""
        request.spec.dataset_version = request.dataset_version
        return suggestion_pb2.SuggestTrainingSpecResponse(spec=request.spec)

    def CreateTrainingJob(self, request: Any, _context: Any) -> resources_pb2.TrainingJob:  # noqa: N802
        self.specs.append(request.spec)
        return resources_pb2.TrainingJob(name="trainingJobs/j", spec=request.spec)


def create(servicer: Creating, *options: str) -> Result:
    def register(server: Any) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ("train", "create", "j", *options, "--train-address", address))
    assert "Traceback" not in result.output
    return result


def created(*options: str) -> Spec:
    servicer = Creating()
    result = create(servicer, "--dataset-version", VERSION, *options)
    assert result.exit_code == 0, result.output
    (spec,) = servicer.specs
    return spec


def transformed(*options: str) -> Any:
    servicer = Recording()
    result = run_data(servicer, "transform", VERSION, *options)
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    return request


def of(chain: Sequence[transform_pb2.TransformStep]) -> transform_pb2.Transform:
    return transform_pb2.Transform(steps=chain)


def test_each_step_of_a_transform_is_an_option_and_their_order_is_that_of_the_steps() -> None:
    request = transformed(
        *("--drop", "name", "--filter", "age > 3 and fare < 500", "--drop", "cabin,ticket"),
        *("--rename", "sex=gender,pclass=class", "--cast", "price=float32", "--fill-nulls", "age=median"),
        *("--fill-nulls", "deck=unknown", "--fill-nulls", "fare=7.5", "--fill-nulls", 'code="12"'),
        *("--standardize", "age, fare", "--min-max-scale", "price", "--one-hot", "gender"),
        *("--ordinal-encode", "class", "--bucketize", "year=1990,2000.5", "--decode-image", "photo"),
        *("--resize", "photo=32x48", "--center-crop", "photo=28x24", "--grayscale", "photo"),
        *("--concat", "features=age,fare", "--select", "features,class"),
    )

    assert request.transform == of(
        [
            steps.drop("name"),
            steps.filter_rows("age > 3 and fare < 500"),
            steps.drop("cabin", "ticket"),
            steps.rename({"sex": "gender", "pclass": "class"}),
            steps.cast("price", "float32"),
            steps.fill_nulls("age", statistic="median"),
            steps.fill_nulls("deck", "unknown"),
            steps.fill_nulls("fare", 7.5),
            steps.fill_nulls("code", "12"),
            steps.standardize("age"),
            steps.standardize("fare"),
            steps.min_max_scale("price"),
            steps.one_hot_encode("gender"),
            steps.ordinal_encode("class"),
            steps.bucketize("year", [1990, 2000.5]),
            steps.decode_image("photo"),
            steps.resize("photo", 32, 48),
            steps.center_crop("photo", 28, 24),
            steps.grayscale("photo"),
            steps.concat(["age", "fare"], "features"),
            steps.select("features", "class"),
        ]
    )


def test_a_tokenizer_is_learnt_of_a_number_and_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")

    request = transformed("--tokenize", "title=16:300", "--tokenize", f"text=64:{tmp_path}/tokenizer.json")

    assert request.transform == of(
        [steps.tokenize("title", 16, vocabulary_size=300), steps.tokenize("text", 64, tokenizer='{"é": 1}')]
    )


def test_the_steps_of_a_file_come_where_its_option_stands(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text('{"steps": [{"column": "age", "standardize": {}}, {"column": "sex", "minMaxScale": {}}]}')

    request = transformed("--fill-nulls", "age=mean", "--steps", str(file), "--drop", "id")

    made = [
        steps.fill_nulls("age", statistic="mean"),
        steps.standardize("age"),
        steps.min_max_scale("sex"),
        steps.drop("id"),
    ]
    assert request.transform == of(made)


def test_random_shares_are_one_option() -> None:
    request = transformed("--split", "train=0.8,test=0.2", "--seed", "5")
    assert request.splits == specs.ratio_split({"train": 0.8, "test": 0.2}, seed=5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--fill-nulls", "age"), "'age': use COLUMN=VALUE, e.g. --fill-nulls age=median"),
        (("--standardize", "age,,fare"), "--standardize age,fare (a name is empty)"),
        (("--bucketize", "age=young"), "use COLUMN=NUMBER,…, e.g. --bucketize age=18,65"),
        (("--tokenize", "text=64"), "use COLUMN=LENGTH:VOCABULARY|FILE, e.g. --tokenize review=128:8000"),
        (("--tokenize", "text=64:/none"), "No such file or directory: '/none'"),
        (("--resize", "image=64"), "use COLUMN=HEIGHTxWIDTH, e.g. --resize image=64x64"),
        (("--rename", "sex"), "--rename sex=gender"),
        (("--rename", "sex=gender,sex=kind"), "'sex' is there twice"),
        (("--split", "train=0.8,train=0.2"), "'train' has a share already"),
        (("--split-ratio", "--share", "train=0.8", "--share", "train=0.2"), "'train' has a share already"),
        (("--concat", "features="), "--concat features=age,fare"),
        (("--split", "train"), "use SPLIT=WEIGHT"),
        (("--split", "train=1", "--share", "test=1"), "--split has its shares itself"),
        (("--split", "train=1", "--split-column", "s"), "use one of --split, "),
        ((), "say what to do: a step, e.g. --standardize COLUMN"),
    ],
)
def test_a_wrong_option_of_a_transform_is_named_with_an_example(options: tuple[str, ...], expected: str) -> None:
    servicer = Recording()
    result = run_data(servicer, "transform", VERSION, *options)

    assert (result.exit_code, servicer.asked) == (2, [])
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_a_version_alone_leaves_all_the_rest_to_the_suggestion() -> None:
    assert created() == Spec(dataset_version=VERSION)


def test_pixels_may_be_normalised_by_numbers_of_ones_own() -> None:
    assert created("--mean", "0.5", "--std", "0.25").transform == of([steps.to_float(), steps.normalize(0.5, 0.25)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--workers", "1..4"), Spec(num_workers=4, min_workers=1)),
        (("--workers", "0"), Spec(num_workers=0)),
        (("--epochs", "3"), Spec(epochs=3)),
        (("--learning-rate", "0.002"), Spec(optimizer=resources_pb2.Optimizer(learning_rate=0.002))),
        (("--constant",), Spec(optimizer=resources_pb2.Optimizer(schedule="SCHEDULE_CONSTANT"))),
        (("--gpus", "1"), Spec(placement=resources_pb2.Placement(gpus_per_worker=1))),
        (("--patience", "0"), Spec(early_stopping=resources_pb2.EarlyStopping())),
        (("--precision", "float32"), Spec(precision=Spec.PRECISION_FLOAT32)),
        (("--precision", "tf32"), Spec(precision=Spec.PRECISION_TF32)),
        (("--prefetch-batches", "0"), Spec(acceleration=resources_pb2.Acceleration(prefetch_batches=0))),
        (("--channels-last",), Spec(acceleration=resources_pb2.Acceleration(channels_last=True))),
        (("--algorithms", "fastest"), Spec(acceleration=resources_pb2.Acceleration(algorithms="ALGORITHMS_FASTEST"))),
        (
            ("--transform-device", "worker"),
            Spec(acceleration=resources_pb2.Acceleration(transform_device="TRANSFORM_DEVICE_WORKER")),
        ),
        (("--num-classes", "10"), Spec(model=resources_pb2.Model(num_classes=10))),
    ],
)
def test_each_option_sets_its_own_field_alone(options: tuple[str, ...], expected: Spec) -> None:
    expected.dataset_version = VERSION
    assert created(*options) == expected


def test_checkpoints_may_be_taken_by_time() -> None:
    assert created("--checkpoint-every", "90").checkpoints.every.seconds == 90


def test_a_tables_regression_needs_no_file() -> None:
    spec = created(
        *("--task", "regression", "--target-scaling", "standard", "--label-column", "fare"),
        *("--concat", "features=distance,tolls", "--model", "mlp", "--model-arg", "hidden=[64,32]"),
        *("--model-arg", "activation=gelu", "--in-channels", "2", "--num-classes", "1"),
        *("--loss", "huber", "--loss-arg", "delta=2", "--metrics", "mae,r2", "--best-metric", "validation_mae"),
        *("--optimizer", "SGD", "--optimizer-arg", "momentum=0.9", "--optimizer-arg", "nesterov=true"),
        *("--patience", "3", "--min-delta", "0.01", "--keep-newest", "2", "--keep-best", "2"),
    )

    assert spec.transform == of([steps.concat(["distance", "tolls"], "features")])
    assert (spec.input_column, spec.label_column) == ("features", "fare")
    assert (spec.task, spec.target_scaling) == (Spec.TASK_REGRESSION, Spec.TARGET_SCALING_STANDARD)
    assert json_format.MessageToDict(spec.model.kwargs) == {"hidden": [64, 32], "activation": "gelu"}
    assert (spec.loss.name, dict(spec.loss.kwargs)) == ("huber", {"delta": 2})
    assert list(spec.metrics) == ["mae", "r2"]
    assert dict(spec.optimizer.kwargs) == {"momentum": 0.9, "nesterov": True}
    assert spec.early_stopping == resources_pb2.EarlyStopping(patience=3, min_delta=0.01)
    assert spec.checkpoints == resources_pb2.CheckpointPolicy(keep_newest=2, keep_best=2, best_metric="validation_mae")


def test_augmentations_keep_their_order_and_a_file_its_place(tmp_path: Path) -> None:
    file = tmp_path / "more.json"
    file.write_text('{"steps": [{"grayscale": {}}]}')

    spec = created(
        *("--decode-image", "--resize", "40x40", "--random-crop", "32x32:4", "--transform", str(file)),
        *("--random-flip", "0.5", "--random-rotation", "10", "--color-jitter", "0.2,0.1,0", "--center-crop", "28x28"),
        *("--to-float", "--normalize", "0.4,0.5,0.6:0.2,0.2,0.3"),
    )

    assert spec.transform == of(
        [
            steps.decode_image(""),
            steps.resize("", 40, 40),
            steps.random_crop(32, 32, padding=4),
            steps.grayscale(""),
            steps.random_flip(horizontal=0.5),
            steps.random_rotation(10),
            steps.color_jitter(brightness=0.2, contrast=0.1),
            steps.center_crop("", 28, 28),
            steps.to_float(),
            steps.normalize([0.4, 0.5, 0.6], [0.2, 0.2, 0.3]),
        ]
    )


def test_how_and_where_it_runs_are_options() -> None:
    spec = created(
        *("--precision", "bfloat16", "--accumulation-steps", "2", "--max-gradient-norm", "1", "--compile"),
        *("--parallel", "fsdp", "--ingest", "ray-data", "--min-workers", "1", "--cpus", "2", "--gpus", "0.5"),
        *("--checkpoint-every-steps", "50", "--initial-checkpoint", "trainingJobs/a/checkpoints/final"),
        *("--train-split", "a", "--validation-split", "b", "--input-column", "photo", "--label-smoothing", "0.1"),
    )

    assert (spec.precision, spec.ingest) == (Spec.PRECISION_BFLOAT16, Spec.INGEST_RAY_DATA)
    assert (spec.accumulation_steps, spec.max_gradient_norm, spec.compile) == (2, 1, True)
    assert spec.placement == resources_pb2.Placement(parallel="FSDP", cpus_per_worker=2, gpus_per_worker=0.5)
    assert (spec.min_workers, spec.checkpoint_every_steps) == (1, 50)
    assert spec.initial_checkpoint == "trainingJobs/a/checkpoints/final"
    assert (spec.train_split, spec.validation_split, spec.input_column) == ("a", "b", "photo")
    assert spec.loss.label_smoothing == 0.1


def test_the_inputs_of_a_model_that_takes_several_are_an_option() -> None:
    spec = created("--input-columns", "image,age", "--label-column", "ill")

    assert (list(spec.input_columns), spec.input_column, spec.label_column) == (["image", "age"], "", "ill")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--model-arg", "hidden"), "'hidden': use NAME=VALUE, e.g. --model-arg dropout=0.1"),
        (("--optimizer-arg", "a=1", "--optimizer-arg", "a=2"), "a has a value already"),
        (("--normalize", "0.5"), "use MEAN,…:STD,…, e.g. --normalize 0.1307:0.3081"),
        (("--color-jitter", "0.5"), "--color-jitter 0.2,0.2,0"),
        (("--mean", "0.5", "--to-float"), "use --normalize MEAN:STD"),
        (("--min-delta", "0.5"), "--min-delta needs --patience"),
        (("--workers", "4..1"), "MAX at least MIN, e.g. 1..4"),
        (("--workers", "many"), "use a number, or MIN..MAX"),
        (("--workers", "1..4", "--min-workers", "2"), "leave --min-workers out"),
    ],
)
def test_a_wrong_option_of_a_job_is_named_with_an_example(options: tuple[str, ...], expected: str) -> None:
    servicer = Creating()
    result = create(servicer, "--dataset-version", VERSION, *options)

    assert (result.exit_code, servicer.specs) == (2, [])
    assert expected in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", [("--epochs", "3"), ("--to-float",), ("--model-arg", "a=1")])
def test_an_option_beside_a_whole_specification_is_refused_not_ignored(tmp_path: Path, option: tuple[str, ...]) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json_format.MessageToJson(Spec(dataset_version=VERSION, epochs=2)))
    servicer = Creating()

    refused = create(servicer, "--spec", str(file), *option)
    taken = create(servicer, "--spec", str(file), "--json")

    assert refused.exit_code == 2
    assert f"leave {option[0]} out" in refused.stderr
    assert taken.exit_code == 0, taken.output
    assert [spec.epochs for spec in servicer.specs] == [2]


def test_help_shows_examples_that_work() -> None:
    reported = CliRunner().invoke(millrace, ("data", "transform", "--help")).stdout
    assert "--fill-nulls age=median --standardize age,fare --one-hot sex,class" in reported
    assert "--target-scaling standard" in CliRunner().invoke(millrace, ("train", "create", "--help")).stdout
