"""Ray Tune's `Tuner` in a script, as a sweep: its space and configuration in plain values, and its results.

Settings that a sweep does not support are refused with the script's file and line. A trainer's `fit()` returns Ray's
own `Result`, with checkpoints of the job's registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd  # type: ignore[import-untyped]
import pyarrow.fs
from ray.air.result import Result
from ray.train import Checkpoint
from ray.train import Result as TrainResult
from ray.train.v2.torch.torch_trainer import TorchTrainer

from shared.errors import Internal, InvalidArgument
from train_service.domain.sweep import CHOICE, GRID, INTEGERS, LOG_UNIFORM, UNIFORM
from train_service.program.ray_hooks import asha_facts

# --- Tuner ---

LOOP_CONFIG = "train_loop_config"
GRID_SEARCH = "grid_search"


class TrialDone(BaseException):
    """The script of a trial has trained.

    It is not an `Exception`, so that a script that catches those ends all the same.
    """


class Driver(Protocol):
    """The implementation behind the script's calls."""

    def line(self) -> str: ...

    def tune(self, trainer: Any, space: Mapping[str, Any], settings: Mapping[str, Any], line: str) -> TrialResults: ...


def tuner_of(driver: Driver) -> type:
    """Return the class that replaces `ray.tune.Tuner`."""

    class Tuner:
        def __init__(
            self,
            trainable: Any = None,
            *,
            param_space: Mapping[str, Any] | None = None,
            tune_config: Any = None,
            run_config: Any = None,
        ) -> None:
            self._line = driver.line()
            if run_config is not None:
                raise _refused(self._line, "Tuner(run_config=...) is not supported", "leave it out")
            if not isinstance(trainable, TorchTrainer):
                kind = getattr(trainable, "__name__", type(trainable).__name__)
                raise _refused(self._line, f"Tuner({kind}) is not supported", "give it a TorchTrainer")
            self._trainer = trainable
            self._space = space_of(param_space or {}, self._line)
            self._settings = settings_of(tune_config, self._line)

        def fit(self) -> TrialResults:
            return driver.tune(self._trainer, self._space, self._settings, driver.line())

        @classmethod
        def restore(cls, *_: Any, **__: Any) -> Tuner:
            remedy = "run the script again under the same job: its sweep goes on by itself"
            raise _refused(driver.line(), "Tuner.restore() is not supported", remedy)

    return Tuner


def space_of(param_space: Mapping[str, Any], line: str) -> dict[str, Any]:
    """Return the search space: `constants` of `train_loop_config`, and `domains` by dotted path.

    The domains hold the fields of `search_space.Domain`.
    """
    others = sorted(set(param_space) - {LOOP_CONFIG})
    if others:
        raise _refused(line, f"param_space[{others[0]!r}] is not supported", f"search param_space[{LOOP_CONFIG!r}]")
    domains: dict[str, Any] = {}
    constants = _divided(param_space.get(LOOP_CONFIG, {}), "", domains, line)
    if not domains:
        raise _refused(line, f"param_space[{LOOP_CONFIG!r}] has nothing to search", "use tune.choice and the like")
    return {"constants": constants, "domains": domains}


def _divided(values: Mapping[str, Any], path: str, domains: dict[str, Any], line: str) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and set(value) == {GRID_SEARCH}:
            domains[inner] = {"kind": GRID, "values": list(value[GRID_SEARCH])}
        elif isinstance(value, Mapping):
            constants[key] = _divided(value, inner, domains, line)
        elif type(value).__module__.startswith("ray.tune"):
            domains[inner] = _domain(value, inner, line)
        else:
            constants[key] = value
    return constants


def _domain(value: Any, path: str, line: str) -> dict[str, Any]:
    kind, sampler = type(value).__name__, type(value.get_sampler()).__name__
    if kind == "Categorical" and sampler == "_Uniform":
        return {"kind": CHOICE, "values": list(value.categories)}
    if kind == "Float" and sampler == "_Uniform":
        return {"kind": UNIFORM, "low": value.lower, "high": value.upper}
    if kind == "Float" and sampler == "_LogUniform":
        return {"kind": LOG_UNIFORM, "low": value.lower, "high": value.upper}
    if kind == "Integer" and sampler == "_Uniform":
        return {"kind": INTEGERS, "low": value.lower, "high": value.upper - 1}  # a sweep's range includes both ends
    what = f"param_space[{LOOP_CONFIG!r}] has {value.domain_str or kind} of {sampler.strip('_')} as {path!r}"
    raise _refused(
        line, what, "use tune.grid_search, tune.choice, tune.uniform, tune.loguniform or tune.randint for it"
    )


def settings_of(tune_config: Any, line: str) -> dict[str, Any]:
    """Return a `TuneConfig` as `metric`, `maximize`, `num_samples`, `max_concurrent`, and `asha` or None."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if tune_config is None:
        raise _refused(line, "Tuner has no tune_config", "say TuneConfig(metric=..., mode=...)")
    scheduler = tune_config.scheduler
    for what, is_set in (
        ("search_alg", tune_config.search_alg is not None),
        ("time_budget_s", tune_config.time_budget_s is not None),
        ("reuse_actors=True", bool(tune_config.reuse_actors)),
        ("trial_name_creator", tune_config.trial_name_creator is not None),
    ):
        if is_set:
            raise _refused(line, f"TuneConfig({what.partition('=')[0]}=...) is not supported", "leave it out")
    asha = None
    if type(scheduler) is ASHAScheduler:
        asha = _asha(scheduler, line)
    elif scheduler is not None and type(scheduler) is not FIFOScheduler:
        raise _refused(line, f"{type(scheduler).__name__} is not supported", "use ASHAScheduler, or no scheduler")
    metric, mode = tune_config.metric, tune_config.mode
    if asha is not None:
        of_scheduler = asha.pop("metric"), asha.pop("mode")
        metric, mode = metric or of_scheduler[0], mode or of_scheduler[1]
    if not metric or mode not in ("min", "max"):
        raise _refused(line, "TuneConfig names no metric and mode", "say TuneConfig(metric=..., mode='min')")
    return {
        "metric": str(metric),
        "maximize": mode == "max",
        "num_samples": int(tune_config.num_samples),
        "max_concurrent": int(tune_config.max_concurrent_trials or 0),
        "asha": asha,
    }


def _asha(scheduler: Any, line: str) -> dict[str, Any]:
    facts = asha_facts(scheduler)
    time_attr = facts.pop("time_attr")
    if time_attr != "training_iteration":
        text = f"ASHAScheduler(time_attr={time_attr!r}) is not supported"
        raise _refused(line, text, "leave it out: a trial's reports with a checkpoint count")
    if facts.pop("brackets") != 1:
        raise _refused(line, "ASHAScheduler(brackets=...) is not supported", "leave it out")
    return facts


def _refused(line: str, what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(f"{line}: {what}; {remedy}", reason="TUNER_NOT_SUPPORTED", metadata={"line": line})


@dataclass(frozen=True)
class TrialResults:
    """The result of `Tuner.fit()`: a `Result` per trial, ordered by number, as in Ray's `ResultGrid`."""

    results: Sequence[Result]
    metric: str
    maximize: bool

    @classmethod
    def from_answer(
        cls, described: Mapping[str, Any], settings: Mapping[str, Any], fetch: Callable[[str], str]
    ) -> TrialResults:
        """Build the results. `described` is the attempt's answer, see `ScriptSweep.ended`."""
        results = [_result(trial, fetch) for trial in described["trials"]]
        return cls(results, settings["metric"], settings["maximize"])

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, number: int) -> Result:
        return self.results[number]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    @property
    def errors(self) -> list[Exception]:
        """The errors of the trials that failed."""
        return [result.error for result in self.results if result.error is not None]

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """The number of trials that ended without an error, early or not."""
        return len(self.results) - self.num_errors

    def get_best_result(self, metric: str | None = None, mode: str | None = None, *_: Any, **__: Any) -> Result:
        """Return the trial with the best checkpoint by the metric, with that checkpoint and its `metrics`.

        Raises `RuntimeError` if no trial reported the metric, as Ray does.
        """
        metric = metric or self.metric
        sign = 1 if (mode == "max" if mode else self.maximize) else -1
        pairs = [
            (sign * metrics[metric], -number, trial, checkpoint, metrics)
            for number, trial in enumerate(self.results)
            for checkpoint, metrics in trial.best_checkpoints or ()
            if metric in metrics
        ]
        if not pairs:
            raise RuntimeError(f"no trial has reported {metric!r} together with a checkpoint")
        *_rank, trial, checkpoint, metrics = max(pairs, key=lambda one: one[:2])
        config = (trial.metrics or {}).get("config")
        return Result(
            metrics={**metrics, "config": config},
            checkpoint=checkpoint,
            error=trial.error,
            path=trial.path,
            metrics_dataframe=trial.metrics_dataframe,
            best_checkpoints=trial.best_checkpoints,
        )

    def get_dataframe(self, *_: Any, **__: Any) -> Any:
        """Return a row per trial: its last metrics, and its values as `config/...`."""
        rows = []
        for result in self.results:
            metrics = dict(result.metrics or {})
            config = metrics.pop("config", {}).get(LOOP_CONFIG, {})
            rows.append({**metrics, **{f"config/{LOOP_CONFIG}/{name}": value for name, value in config.items()}})
        return pd.DataFrame(rows)


def _result(trial: Mapping[str, Any], fetch: Callable[[str], str]) -> Result:
    pairs = [
        (RegistryCheckpoint(checkpoint["name"], fetch), dict(checkpoint["metrics"]))
        for checkpoint in trial["checkpoints"]
    ]
    return Result(
        metrics={**(pairs[-1][1] if pairs else {}), "config": {LOOP_CONFIG: trial["config"]}},
        checkpoint=pairs[-1][0] if pairs else None,
        error=Internal(trial["error"]) if trial["error"] else None,
        path=trial["name"],
        metrics_dataframe=pd.DataFrame([metrics for _, metrics in pairs]) if pairs else None,
        best_checkpoints=pairs,
    )


# --- Result of a run ---


class RegistryCheckpoint(Checkpoint):
    """A checkpoint of the job, `trainingJobs/{j}/checkpoints/{c}`.

    Its files are copied to this node when they are first used, verified and read-only, and deleted when the attempt
    ends. It pickles as that folder, for tasks and actors on the same node.
    """

    def __init__(self, name: str, fetch: Callable[[str], str]) -> None:
        """Refer to a checkpoint. `fetch` returns the folder of a checkpoint by name."""
        self.name = name
        self._fetch = fetch
        self._folder = ""
        self.filesystem = pyarrow.fs.LocalFileSystem()

    @property
    def path(self) -> str:  # type: ignore[override]
        self._folder = self._folder or self._fetch(self.name)
        return self._folder

    def __repr__(self) -> str:
        return f"Checkpoint({self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegistryCheckpoint) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpoint, (self.path, self.filesystem)


def result_of(described: Mapping[str, Any], fetch: Callable[[str], str]) -> TrainResult:
    """Build the result of a run from the attempt's answer.

    `described` has `path`, `metrics` of the newest report, and `checkpoints`, oldest first, each with `name` and
    `metrics`. As with Ray the data frame has a row per checkpoint, and the frame and the checkpoint are None if there
    is none.
    """
    pairs = [
        (RegistryCheckpoint(checkpoint["name"], fetch), dict(checkpoint["metrics"]))
        for checkpoint in described["checkpoints"]
    ]
    return TrainResult(
        metrics=dict(described["metrics"]) or None,
        checkpoint=pairs[-1][0] if pairs else None,
        error=None,
        path=described["path"],
        metrics_dataframe=pd.DataFrame([metrics for _, metrics in pairs]) if pairs else None,
        best_checkpoints=pairs,
    )
