"""What to search, as plain values with every default filled in. The messages of the contract describe each field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from shared.checkpoint.ranking import Ranking
from shared.durable import fields_of
from shared.errors import InvalidArgument, MillraceError, invalid_field, invalid_fields
from train_service.domain import search_space, spec_rules
from train_service.domain.search_space import GRID, Domain, Parameters, Problem
from train_service.domain.spec import TrainingSpec

MAX_TRIALS = 1000
MAX_CONCURRENT_TRIALS = 64
DIGITS = 3
MAX_SWEEP_ID = 63 - DIGITS - 1
# Fields of a trial that the sweep fills in from one of its own.
_OURS = {"checkpoints.best_metric": "spec.metric"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Asha:
    """In epochs, of programs in reports; `max_t` 0: the epochs of the trials."""

    grace_period: int = 1
    reduction_factor: float = 4.0
    max_t: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Mirrors `millrace.train.v1.SweepSpec`. `base` ranks its checkpoints by the sweep's metric."""

    base: TrainingSpec
    parameters: dict[str, Domain] = field(default_factory=dict)
    num_samples: int = 1
    seed: int = 0
    max_concurrent_trials: int = 4
    asha: Asha | None = None

    @property
    def ranking(self) -> Ranking:
        return self.base.checkpoints.ranking

    @property
    def trial_count(self) -> int:
        return search_space.number_of_trials(self.parameters, self.num_samples)

    def parameters_of(self, number: int) -> Parameters:
        return search_space.parameters_of(self.parameters, self.seed, number)

    def training_of(self, parameters: Parameters) -> TrainingSpec:
        """The specification of the trial that has these parameters."""
        return TrainingSpec.from_config(search_space.with_values(self._base_config, parameters))

    @cached_property
    def _base_config(self) -> dict[str, Any]:
        return self.base.as_config()

    @property
    def max_epochs(self) -> int:
        """Of any trial."""
        space = {path: one for path, one in self.parameters.items() if path == "epochs"}
        return max(self.training_of(one).epochs for one in search_space.probes(space, self.seed))

    def as_config(self) -> dict[str, Any]:
        parameters = {path: {**asdict(one), "values": list(one.values)} for path, one in self.parameters.items()}
        return {**asdict(self), "base": self.base.as_config(), "parameters": parameters}  # as JSON gives it back

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SweepSpec:
        return cls(
            **{
                **fields_of(cls, config),
                "base": TrainingSpec.from_config(config["base"]),
                "parameters": {path: Domain.from_config(one) for path, one in config["parameters"].items()},
                "asha": Asha(**fields_of(Asha, config["asha"])) if config["asha"] else None,
            }
        )


def trial_id(sweep_id: str, number: int) -> str:
    """The id of the training job."""
    return f"{sweep_id}-{number:0{DIGITS}d}"


def check(spec: SweepSpec) -> None:
    """Raises `InvalidArgument` naming every field that is out of its bounds, or what of a trial is."""
    broken = [*search_space.problems(spec.parameters), *_of_numbers(spec), *_of_program(spec)]
    if broken:
        raise _refusal(broken)
    count = spec.trial_count
    if count > MAX_TRIALS:
        remedy = f"with the grid it makes {count:,} trials; at most {MAX_TRIALS:,} are allowed"
        raise invalid_field("spec.num_samples", spec.num_samples, remedy)
    # With so few trials no grid is large.
    if twice := search_space.repetitions(spec.parameters):
        raise _refusal(twice)
    if spec.num_samples > 1 and all(one.kind == GRID for one in spec.parameters.values()):
        remedy = "a grid alone gives the same trials again; leave it out, or let each trial draw its seed"
        raise invalid_field("spec.num_samples", spec.num_samples, remedy)
    _check_rules(spec, count)


def _check_rules(spec: SweepSpec, count: int) -> None:
    """The rules for plain fields, for all of `count` trials and for those that stand for the rest.

    The rules do not look into arguments that are passed on, whose values may be many and large: those of the first
    trial will do.
    """
    plain = {path: one for path, one in spec.parameters.items() if search_space.is_plain_field(path)}
    first = spec.parameters_of(0)
    passed_on = replace(spec, base=spec.training_of({path: one for path, one in first.items() if path not in plain}))
    trials = (spec.parameters_of(number) for number in range(count))
    for parameters in chain(trials, search_space.probes(plain, spec.seed)):
        try:
            spec_rules.check(passed_on.training_of({path: parameters[path] for path in plain}))
        except MillraceError as error:
            raise renamed(error, {**first, **parameters}) from None


def with_trial_named(check_trial: Callable[[TrainingSpec], T], spec: SweepSpec, parameters: Parameters) -> T:
    """What `check_trial` makes of the trial's specification; what it refuses is told by the fields of the sweep."""
    try:
        return check_trial(spec.training_of(parameters))
    except MillraceError as error:
        raise renamed(error, parameters) from None


def renamed(error: MillraceError, parameters: Parameters) -> MillraceError:
    """Errors of a trial's `spec.x` are those of `spec.parameters[x]` where the sweep sets x, else of `spec.base.x`. One
    that names no field of it stays as it is."""
    if not error.fields:
        return error
    message, fields = error.message, []
    for path, text in error.fields:
        inner = path.removeprefix("spec.")
        swept = [one for one in parameters if one == inner or one.startswith(f"{inner}.")]
        ours = f"spec.parameters[{swept[0]}]" if swept else _OURS.get(inner, f"spec.base.{inner}")
        # A path is the client's text, in which a backslash is nothing special.
        pattern = rf"(?<![\w.]){re.escape(path)}(?!\w|\.\w|\[)"
        message = re.sub(pattern, ours.replace("\\", r"\\"), message, count=1)
        fields.append((ours, text))
    if parameters:
        message += f" (in the trial with {', '.join(f'{path}={value!r}' for path, value in parameters.items())})"
    metadata = {**error.metadata, **({"field": fields[0][0]} if isinstance(error, InvalidArgument) else {})}
    return type(error)(message, reason=error.specific_reason, metadata=metadata, fields=fields)


def _refusal(broken: list[Problem]) -> InvalidArgument:
    return invalid_fields((f"spec.{path}", value, remedy) for path, value, remedy in broken)


def _of_program(spec: SweepSpec) -> list[Problem]:
    """What a program's sweep needs, and which parameters go with a program and which with Millrace's own loop."""
    is_program = spec.base.program is not None
    paths = {path: path.startswith(search_space.PROGRAM_CONFIG) for path in spec.parameters}
    if not is_program:
        remedy = "the base has no program; give one, or search its own fields"
        return [(f"parameters[{path}]", path, remedy) for path, of_program in sorted(paths.items()) if of_program]
    remedy = f"with a program trials differ in {search_space.PROGRAM_CONFIG}* and {', '.join(search_space.OF_PROGRAMS)}"
    found: list[Problem] = [
        (f"parameters[{path}]", path, remedy)
        for path, of_program in sorted(paths.items())
        if not of_program and path not in search_space.OF_PROGRAMS
    ]
    if not spec.ranking.metric:
        found.append(("metric", "", "name one that the program reports together with a checkpoint"))
    if spec.asha is not None and not spec.asha.max_t:
        found.append(("asha.max_t", 0, "a program has no number of epochs; use the most reports of a trial"))
    return found


def _of_numbers(spec: SweepSpec) -> list[Problem]:
    found: list[tuple[bool, str, object, str]] = [
        (spec.num_samples >= 1, "num_samples", spec.num_samples, "use 1 or more"),
        (
            1 <= spec.max_concurrent_trials <= MAX_CONCURRENT_TRIALS,
            "max_concurrent_trials",
            spec.max_concurrent_trials,
            f"use 0 (for 4) to {MAX_CONCURRENT_TRIALS}",
        ),
    ]
    if (asha := spec.asha) is not None:
        found += [
            (asha.grace_period >= 1, "asha.grace_period", asha.grace_period, "use 1 or more, in epochs"),
            (
                1 < asha.reduction_factor < math.inf,
                "asha.reduction_factor",
                asha.reduction_factor,
                "use a number above 1",
            ),
            (
                asha.max_t == 0 or asha.max_t >= asha.grace_period,
                "asha.max_t",
                asha.max_t,
                "use 0, or at least asha.grace_period",
            ),
        ]
    return [(path, value, remedy) for holds, path, value, remedy in found if not holds]
