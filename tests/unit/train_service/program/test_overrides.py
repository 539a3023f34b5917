"""What of a script's configurations its job overrides is said in full."""

from __future__ import annotations

from shared.model_spec import ModelSpec
from train_service.domain.spec import CheckpointPolicy, Placement, TrainingSpec
from train_service.program.overrides import Asked, overridden

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


def test_what_the_job_has_too_is_not_overridden() -> None:
    same = Asked(
        num_workers=[2, 4],
        use_gpu=True,
        resources_per_worker={"CPU": 2, "disk": 1.0, "accelerator_type:A100": 0.001},
        accelerator_type="A100",
        max_failures=3,
        num_to_keep=2,
    )
    assert overridden(same, SPEC, use_gpu=True) == []
    assert overridden(Asked(num_workers=4), SPEC, use_gpu=False) == []


def test_all_else_is_said_once_each() -> None:
    other = Asked(
        num_workers=8,
        use_gpu=True,
        resources_per_worker={"accelerator_type:T4": 0.0001},
        accelerator_type="T4",
        placement_strategy="SPREAD",
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
        "ScalingConfig(use_gpu=True) asks for a GPU for each worker, and the job's workers have none: they compute on "
        "CPUs",
        "the job's placement.strategy PACK counts, and not ScalingConfig(placement_strategy='SPREAD')",
        "the job's placement.accelerator_type A100 counts, and not ScalingConfig(accelerator_type='T4')",
        "RunConfig(storage_path='/mnt/x') is not used: checkpoints are in the job's own registry",
        "the job's max_failures 3 counts, and not FailureConfig(max_failures=-1)",
        "the job's checkpoints.keep_newest 2 counts, and not CheckpointConfig(num_to_keep=5)",
        "RunConfig(callbacks=...) is not used: 2 callbacks are not called",
        "RunConfig(worker_runtime_env=...) is not used: workers have the job's bundle and the installed packages",
        "TorchTrainer(validation_config=...) is not used: validate in the training function",
        "ScalingConfig(resources_per_worker={'accelerator_type:T4': 0.0001}) is not used: the job's placement says "
        "what workers need",
        "train_loop_config['lr'] is 0.2, by the job's configuration, and not 0.1",
    ]
    assert overridden(Asked(num_workers=4), SPEC, use_gpu=True) == [
        "the job's workers have GPUs, without ScalingConfig(use_gpu=True)"
    ]
