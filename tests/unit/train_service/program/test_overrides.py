"""What of a script's configurations its job overrides is said in full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray.train.torch import TorchConfig
from ray.train.v2.api.config import FailureConfig, ScalingConfig

from millrace.train.v1 import code_bundle_pb2, resources_pb2
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from train_service.attempt.script_process import other_settings
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.spec import CPU, GPU, CheckpointPolicy, Placement, TrainingSpec, spec_of_job
from train_service.program.fit_calls import TrainerSettings, overridden, settled

SPEC = TrainingSpec(
    dataset_version="",
    model=ModelSpec(builder="", in_channels=1, num_classes=1),
    epochs=0,
    global_batch_size=0,
    num_workers=4,
    min_workers=2,
    max_failures=3,
    placement=Placement(accelerator_type="A100", resources_per_worker={"disk": 1.0}),
    checkpoints=CheckpointPolicy(best_metric="", maximize=False, keep_newest=2),
)


def test_settings_equal_to_the_jobs_are_not_reported_as_overridden() -> None:
    same = TrainerSettings(
        num_workers=[2, 4],
        use_gpu=True,
        resources_per_worker={"CPU": 1, "disk": 1.0, "memory": 0, "accelerator_type:A100": 0.001},
        accelerator_type="A100",
        max_failures=3,
        num_to_keep=2,
    )
    assert overridden(same, SPEC, use_gpu=True) == []
    assert overridden(TrainerSettings(num_workers=4), replace(SPEC, min_workers=0), use_gpu=False) == []


def test_all_else_is_said_once_each() -> None:
    other = TrainerSettings(
        num_workers=8,
        use_gpu=True,
        resources_per_worker={"accelerator_type:T4": 0.0001, "CPU": 2, "tape": 1.0},
        placement_strategy="SPREAD",
        backend="nccl",
        timeout_s=60,
        score_attribute="loss",
        others=["ScalingConfig(topology='4x4')"],
        storage_path="/mnt/x",
        max_failures=-1,
        num_to_keep=5,
        callbacks=2,
        has_worker_environment=True,
        has_validation=True,
        config={"lr": ["0.1", "0.2"]},
    )
    assert overridden(other, SPEC, use_gpu=False) == [
        "the job's num_workers 4 counts, and not ScalingConfig(num_workers=8)",
        "the job's placement.cpus_per_worker 1.0 counts, and not ScalingConfig(resources_per_worker={'CPU': 2})",
        "the job's placement.accelerator_type A100 counts, and not ScalingConfig(accelerator_type='T4')",
        "the job's placement.strategy PACK counts, and not ScalingConfig(placement_strategy='SPREAD')",
        "TorchConfig(backend='nccl') is not used: the workers have no GPUs, and talk by gloo",
        "the job's placement.timeout 1800.0 counts, and not TorchConfig(timeout_s=60)",
        "the job's max_failures 3 counts, and not FailureConfig(max_failures=-1)",
        "the job's checkpoints.keep_newest 2 counts, and not CheckpointConfig(num_to_keep=5)",
        "the job's checkpoints.keep_best 1 counts, and not CheckpointConfig(num_to_keep=5)",
        "the job's checkpoints.best_metric (the newest) counts, and not "
        "CheckpointConfig(checkpoint_score_attribute='loss')",
        "the job's checkpoints.order MINIMIZE counts, and not CheckpointConfig(checkpoint_score_order='max')",
        "ScalingConfig(use_gpu=True) asks for a GPU for each worker, and the job's workers have none: they compute on "
        "CPUs",
        "RunConfig(storage_path='/mnt/x') is not used: checkpoints are in the job's own registry",
        "RunConfig(callbacks=...) is not used: 2 callbacks are not called",
        "RunConfig(worker_runtime_env=...) is not used: workers have the job's bundle and the installed packages",
        "TorchTrainer(validation_config=...) is not used: validate in the training function",
        "ScalingConfig(topology='4x4') is not used: a job has no such setting",
        "ScalingConfig(resources_per_worker={'tape': 1.0}) is not used: the job's placement says what workers need",
        "train_loop_config['lr'] is 0.2, by the job's configuration, and not 0.1",
    ]
    assert overridden(TrainerSettings(num_workers=[2, 4]), SPEC, use_gpu=True) == [
        "the job's workers have GPUs, without ScalingConfig(use_gpu=True)"
    ]


def job_of_script(**fields: object) -> TrainingSpec:
    program = code_bundle_pb2.Program(code_bundle="codeBundles/x", entry="cells.py")
    return spec_from_proto(resources_pb2.TrainingSpec(program=program, **fields), ())  # type: ignore[arg-type]


FULL = TrainerSettings(
    num_workers=[2, 6],
    use_gpu=True,
    resources_per_worker={"CPU": 0.5, "GPU": 2, "disk": 1.0, "tape": 0},
    accelerator_type="T4",
    placement_strategy="SPREAD",
    backend="nccl",
    timeout_s=60,
    max_failures=-1,
    max_preemption_failures=7,
    num_to_keep=3,
    score_attribute="accuracy",
    score_order="min",
)


def test_a_run_takes_from_its_script_what_the_caller_left_open() -> None:
    taken, spec = settled(FULL, job_of_script(), 0, lambda _: GPU, "cells.py:3")

    assert (spec.num_workers, spec.min_workers, spec.lanes) == (6, 2, 24)
    assert (spec.max_failures, spec.max_preemptions) == (1000, 7)
    assert spec.placement == Placement(
        cpus_per_worker=0.5,
        gpus_per_worker=2.0,
        resources_per_worker={"disk": 1.0},
        accelerator_type="T4",
        strategy="SPREAD",
        backend="nccl",
        timeout_s=60.0,
    )
    assert spec.checkpoints == CheckpointPolicy(keep_newest=1, keep_best=3, best_metric="accuracy", maximize=False)
    assert overridden(FULL, spec, use_gpu=True) == []
    assert spec_of_job(job_of_script().as_config(), {"script": taken}) == spec


def test_the_callers_values_win_one_by_one() -> None:
    job = job_of_script(num_workers=3, max_failures=0, placement=resources_pb2.Placement(cpus_per_worker=2))
    _, spec = settled(FULL, job, 0, lambda _: GPU, "cells.py:3")

    assert (spec.num_workers, spec.min_workers, spec.lanes, spec.max_failures) == (3, 0, 24, 0)
    assert (spec.placement.cpus_per_worker, spec.placement.strategy) == (2.0, "SPREAD")
    assert overridden(FULL, spec, use_gpu=True) == [
        "the job's num_workers 3 counts, and not ScalingConfig(num_workers=(2, 6))",
        "the job's placement.cpus_per_worker 2.0 counts, and not ScalingConfig(resources_per_worker={'CPU': 0.5})",
        "the job's max_failures 0 counts, and not FailureConfig(max_failures=-1)",
    ]


def test_without_gpus_a_run_takes_neither_their_type_nor_nccl() -> None:
    asked = TrainerSettings(num_workers=2, use_gpu=True, accelerator_type="T4", backend="nccl")
    _, spec = settled(asked, job_of_script(), 0, lambda _: CPU, "cells.py:3")

    assert (spec.placement.accelerator_type, spec.placement.backend) == ("", "")
    assert spec.placement.gpus_per_worker is None  # as the cluster has them
    _, without = settled(TrainerSettings(num_workers=2), job_of_script(), 0, lambda _: CPU, "cells.py:3")
    assert without.placement.gpus_per_worker == 0


def test_another_number_of_gpus_than_one_waits_for_no_gpu_either() -> None:
    asked = TrainerSettings(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    assert settled(asked, job_of_script(), 0, lambda _: CPU, "cells.py:3")[1].placement.gpus_per_worker is None
    assert settled(asked, job_of_script(), 0, lambda _: GPU, "cells.py:3")[1].placement.gpus_per_worker == 0.5


def test_local_mode_by_the_caller_takes_nothing_that_is_of_workers() -> None:
    asked = TrainerSettings(
        num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.25, "memory": 1e9}, max_failures=1
    )
    _, spec = settled(asked, job_of_script(num_workers=0), 0, lambda _: CPU, "cells.py:3")
    assert (spec.local, spec.max_failures, spec.placement) == (True, 1, Placement())


def test_the_order_of_a_metric_goes_with_the_metric() -> None:
    """Ray's default order is `max`: a loss of the caller's would be kept where it is worst."""
    asked = TrainerSettings(num_workers=2, num_to_keep=1, score_attribute="accuracy", score_order="max")
    job = job_of_script(checkpoints=resources_pb2.CheckpointPolicy(best_metric="loss"))
    _, spec = settled(asked, job, 0, lambda _: CPU, "cells.py:3")
    assert (spec.checkpoints.best_metric, spec.checkpoints.maximize) == ("loss", False)


@pytest.mark.parametrize(
    ("num_workers", "min_workers", "field"), [(4, 0, "min_workers 0"), (2, 0, "num_workers 2"), (4, 2, "")]
)
def test_another_range_of_workers_is_said_once(num_workers: int, min_workers: int, field: str) -> None:
    spec = replace(SPEC, num_workers=num_workers, min_workers=min_workers, placement=Placement(), max_failures=0)
    said = overridden(TrainerSettings(num_workers=[2, 4]), spec, use_gpu=False)
    assert said == ([f"the job's {field} counts, and not ScalingConfig(num_workers=(2, 4))"] if field else [])


def test_the_order_of_rows_stays_with_the_first_run() -> None:
    _, more = settled(TrainerSettings(num_workers=20), job_of_script(), 24, lambda _: CPU, "cells.py:3")
    assert (more.num_workers, more.lanes) == (20, 24)
    with pytest.raises(InvalidArgument, match=r"cells.py:3: ScalingConfig\(num_workers=30\) is more than the 24 lanes"):
        settled(TrainerSettings(num_workers=30), job_of_script(), 24, lambda _: CPU, "cells.py:3")
    assert settled(TrainerSettings(num_workers=30), job_of_script(), 0, lambda _: CPU, "cells.py:3")[1].lanes == 60


def test_an_impossible_run_is_refused_with_the_scripts_line() -> None:
    with pytest.raises(InvalidArgument) as caught:
        settled(TrainerSettings(num_workers=80), job_of_script(), 0, lambda _: CPU, "cells.py:3")
    assert caught.value.message.startswith("cells.py:3: of the trainer's configurations: spec.num_workers: 80")


def test_a_script_in_local_mode_asks_for_no_workers() -> None:
    asked = TrainerSettings(num_workers=0, use_gpu=True, resources_per_worker={"GPU": 2}, max_failures=1)
    _, spec = settled(asked, job_of_script(), 0, lambda _: CPU, "cells.py:3")
    assert (spec.local, spec.max_failures, spec.placement.gpus_per_worker) == (True, 1, None)


def test_the_fewest_workers_without_the_most_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"spec.min_workers: 2: it is the fewest of spec.num_workers"):
        job_of_script(min_workers=2)


def test_a_specification_shows_what_is_open_as_unset() -> None:
    shown = spec_to_proto(job_of_script(max_failures=2))
    assert not shown.HasField("num_workers")
    assert shown.max_failures == 2
    assert spec_from_proto(shown, ()) == job_of_script(max_failures=2)


def test_a_setting_without_a_place_is_named() -> None:
    assert other_settings(ScalingConfig(num_workers=2, label_selector={"zone": "a"})) == [
        "ScalingConfig(label_selector={'zone': 'a'})"
    ]
    assert other_settings(TorchConfig(backend="gloo", init_method="tcp")) == ["TorchConfig(init_method='tcp')"]
    assert other_settings(FailureConfig(max_failures=3)) == []
