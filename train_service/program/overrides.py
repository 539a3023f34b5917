"""What a script asks for in its trainer's configurations, and what of it the job overrides, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.durable import fields_of
from train_service.domain.sizing import ACCELERATOR
from train_service.domain.spec import TrainingSpec

PACK = "PACK"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of a trainer: its `ScalingConfig`, `RunConfig` and `TorchConfig`, in plain values. `num_workers` is one number,
    or the fewest and the most."""

    num_workers: int | list[int]
    use_gpu: bool = False
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    accelerator_type: str = ""
    placement_strategy: str = PACK
    storage_path: str = ""
    max_failures: int = 0
    num_to_keep: int | None = None
    callbacks: int = 0
    has_worker_environment: bool = False
    has_validation: bool = False
    # What of `train_loop_config` the job's configuration replaces: by key the script's value and the job's, as text.
    config: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Asked:
        return cls(**fields_of(cls, message))


def overridden(asked: Asked, spec: TrainingSpec, *, use_gpu: bool) -> list[str]:
    """A sentence for each thing that the job decides otherwise; `use_gpu`: its workers have GPUs."""
    placement = spec.placement
    sentences = [
        _sentence("num_workers", spec.num_workers, f"ScalingConfig(num_workers={_workers(asked.num_workers)})")
        if asked.num_workers not in (spec.num_workers, [spec.fewest_workers, spec.num_workers])
        else "",
        "ScalingConfig(use_gpu=True) asks for a GPU for each worker, and the job's workers have none: they compute on "
        "CPUs"
        if asked.use_gpu and not use_gpu
        else "",
        "the job's workers have GPUs, without ScalingConfig(use_gpu=True)" if use_gpu and not asked.use_gpu else "",
        _sentence(
            "placement.strategy", placement.strategy, f"ScalingConfig(placement_strategy={asked.placement_strategy!r})"
        )
        if asked.placement_strategy not in (PACK, placement.strategy)
        else "",
        _sentence(
            "placement.accelerator_type",
            placement.accelerator_type or "(none)",
            f"ScalingConfig(accelerator_type={asked.accelerator_type!r})",
        )
        if asked.accelerator_type not in ("", placement.accelerator_type)
        else "",
        f"RunConfig(storage_path={asked.storage_path!r}) is not used: checkpoints are in the job's own registry"
        if asked.storage_path
        else "",
        _sentence("max_failures", spec.max_failures, f"FailureConfig(max_failures={asked.max_failures})")
        if asked.max_failures not in (0, spec.max_failures)
        else "",
        _sentence(
            "checkpoints.keep_newest",
            spec.checkpoints.keep_newest or "0 (all)",
            f"CheckpointConfig(num_to_keep={asked.num_to_keep})",
        )
        if asked.num_to_keep not in (None, spec.checkpoints.keep_newest)
        else "",
        f"RunConfig(callbacks=...) is not used: {asked.callbacks} callbacks are not called" if asked.callbacks else "",
        "RunConfig(worker_runtime_env=...) is not used: workers have the job's bundle and the installed packages"
        if asked.has_worker_environment
        else "",
        "TorchTrainer(validation_config=...) is not used: validate in the training function"
        if asked.has_validation
        else "",
    ]
    sentences += _resources(asked, placement.resources_per_worker, placement.accelerator_type)
    sentences += [
        f"train_loop_config[{key!r}] is {ours}, by the job's configuration, and not {theirs}"
        for key, (theirs, ours) in sorted(asked.config.items())
    ]
    return [one for one in sentences if one]


def _sentence(field_name: str, value: object, theirs: str) -> str:
    return f"the job's {field_name} {value} counts, and not {theirs}"


def _workers(number: int | list[int]) -> str:
    return str(number) if isinstance(number, int) else f"({', '.join(map(str, number))})"


def _resources(asked: Asked, given: Mapping[str, float], accelerator: str) -> list[str]:
    """Of those that Ray has under other names, and of custom ones."""
    left = {
        name: amount
        for name, amount in asked.resources_per_worker.items()
        if name not in ("CPU", "GPU") and given.get(name) != amount and name != f"{ACCELERATOR}{accelerator}"
    }
    sentence = f"ScalingConfig(resources_per_worker={left}) is not used: the job's placement says what workers need"
    return [sentence] if left else []
