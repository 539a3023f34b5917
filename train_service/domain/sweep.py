"""Sweep specifications as plain values with every default filled in.

The messages of the contract describe each field. The parameters of each trial are a pure function of the search space,
a seed and the trial's number, so every caller computes the same ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from shared.checkpoint.ranking import Ranking
from shared.durable import fields_of
from shared.errors import InvalidArgument, MillraceError, invalid_field, invalid_fields
from train_service.domain import spec_rules
from train_service.domain.spec import BFLOAT16, CONSTANT, COSINE_WITH_WARMUP, FLOAT16, FLOAT32, TF32, TrainingSpec

# --- Sweep ---

MAX_TRIALS = 1000
MAX_CONCURRENT_TRIALS = 64
DIGITS = 3
MAX_SWEEP_ID = 63 - DIGITS - 1
# Fields of a trial that the sweep fills in from its own fields.
_OURS = {"checkpoints.best_metric": "spec.metric"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Asha:
    """ASHA's settings, in epochs.

    For programs they are in reports. If `max_t` is 0, it is the number of epochs of the trials.
    """

    grace_period: int = 1
    reduction_factor: float = 4.0
    max_t: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep specification; it mirrors `millrace.train.v1.SweepSpec`.

    `base` ranks its checkpoints by the sweep's metric.
    """

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
        return number_of_trials(self.parameters, self.num_samples)

    def parameters_of(self, number: int) -> Parameters:
        return parameters_of(self.parameters, self.seed, number)

    def training_of(self, parameters: Parameters) -> TrainingSpec:
        """Return the specification of the trial with these parameters."""
        return TrainingSpec.from_config(with_values(self._base_config, parameters))

    @cached_property
    def _base_config(self) -> dict[str, Any]:
        return self.base.as_config()

    @property
    def max_epochs(self) -> int:
        """Return the largest number of epochs of any trial."""
        space = {path: parameter for path, parameter in self.parameters.items() if path == "epochs"}
        return max(self.training_of(probe).epochs for probe in probes(space, self.seed))

    def as_config(self) -> dict[str, Any]:
        parameters = {
            path: {**asdict(parameter), "values": list(parameter.values)} for path, parameter in self.parameters.items()
        }
        return {**asdict(self), "base": self.base.as_config(), "parameters": parameters}  # JSON has no tuples

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SweepSpec:
        return cls(
            **{
                **fields_of(cls, config),
                "base": TrainingSpec.from_config(config["base"]),
                "parameters": {path: Domain.from_config(parameter) for path, parameter in config["parameters"].items()},
                "asha": Asha(**fields_of(Asha, config["asha"])) if config["asha"] else None,
            }
        )


def trial_id(sweep_id: str, number: int) -> str:
    """Return the id of a trial's training job."""
    return f"{sweep_id}-{number:0{DIGITS}d}"


def check(spec: SweepSpec) -> None:
    """Raise `InvalidArgument` naming every invalid field. Both the sweep and its trials are checked."""
    broken = [*problems(spec.parameters), *_of_numbers(spec), *_of_program(spec)]
    if broken:
        raise _refusal(broken)
    count = spec.trial_count
    if count > MAX_TRIALS:
        remedy = f"with the grid it makes {count:,} trials; at most {MAX_TRIALS:,} are allowed"
        raise invalid_field("spec.num_samples", spec.num_samples, remedy)
    # A grid of at most MAX_TRIALS trials is small enough to search for repetitions.
    if twice := repetitions(spec.parameters):
        raise _refusal(twice)
    if spec.num_samples > 1 and all(parameter.kind == GRID for parameter in spec.parameters.values()):
        remedy = "a grid alone gives the same trials again; leave it out, or let each trial draw its seed"
        raise invalid_field("spec.num_samples", spec.num_samples, remedy)
    _check_rules(spec, count)


def _check_rules(spec: SweepSpec, count: int) -> None:
    """Check the rules for plain fields.

    The check covers all of `count` trials and those of `probes`. The rules do not examine arguments that are passed on,
    whose values may be many and large. So the check uses those of the first trial.
    """
    plain = {path: parameter for path, parameter in spec.parameters.items() if is_plain_field(path)}
    first = spec.parameters_of(0)
    passed_on = replace(spec, base=spec.training_of({path: one for path, one in first.items() if path not in plain}))
    trials = (spec.parameters_of(number) for number in range(count))
    for parameters in chain(trials, probes(plain, spec.seed)):
        try:
            spec_rules.check(passed_on.training_of({path: parameters[path] for path in plain}))
        except MillraceError as error:
            raise renamed(error, {**first, **parameters}) from None


def with_trial_named(check_trial: Callable[[TrainingSpec], T], spec: SweepSpec, parameters: Parameters) -> T:
    """Return the result of `check_trial` for the trial. Its errors are renamed after the sweep's fields."""
    try:
        return check_trial(spec.training_of(parameters))
    except MillraceError as error:
        raise renamed(error, parameters) from None


def renamed(error: MillraceError, parameters: Parameters) -> MillraceError:
    """Return a trial's error with the sweep's fields.

    `spec.x` becomes `spec.parameters[x]` if the sweep sets x, otherwise `spec.base.x`. An error that names no field
    stays unchanged.
    """
    if not error.fields:
        return error
    message, fields = error.message, []
    for path, text in error.fields:
        inner = path.removeprefix("spec.")
        swept = [parameter for parameter in parameters if parameter == inner or parameter.startswith(f"{inner}.")]
        ours = f"spec.parameters[{swept[0]}]" if swept else _OURS.get(inner, f"spec.base.{inner}")
        # A path is the client's text, so escape its backslashes for re.sub.
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
    """Return the problems with a program's sweep. For another sweep these are its program parameters."""
    is_program = spec.base.program is not None
    paths = {path: path.startswith(PROGRAM_CONFIG) for path in spec.parameters}
    if not is_program:
        remedy = "the base has no program; give one, or search its own fields"
        return [(f"parameters[{path}]", path, remedy) for path, of_program in sorted(paths.items()) if of_program]
    remedy = f"with a program trials differ in {PROGRAM_CONFIG}* and {', '.join(OF_PROGRAMS)}"
    found: list[Problem] = [
        (f"parameters[{path}]", path, remedy)
        for path, of_program in sorted(paths.items())
        if not of_program and path not in OF_PROGRAMS
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


# --- Search space ---

GRID, CHOICE, UNIFORM, LOG_UNIFORM, INTEGERS = "grid", "choice", "uniform", "log_uniform", "integers"
LISTED = (GRID, CHOICE)
MAX_VALUES = 1000
MAX_PARAMETERS = 32
# Whole numbers up to this one are exact in JSON.
MAX_WHOLE = 2**53
MANTISSA_BITS = 53

_NONE_LEFT = object()
# Prefix of the path of a key in a program's configuration.
PROGRAM_CONFIG = "program.config."

# A problem: the path of a field, its value, the remedy.
Problem = tuple[str, object, str]
Parameters = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The domain of a parameter.

    A grid and a choice have `values`; the other kinds have `low` and `high`. `integers` include both ends.
    """

    kind: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Domain:
        return cls(**{**fields_of(cls, config), "values": tuple(config["values"])})


def number_of_trials(space: Mapping[str, Domain], num_samples: int) -> int:
    return num_samples * math.prod(len(one.values) for one in space.values() if one.kind == GRID)


def parameters_of(space: Mapping[str, Domain], seed: int, number: int) -> Parameters:
    """Return the parameters of trial `number`, by path.

    Numbers count from 0. The grid's last path changes fastest. Random values depend only on the seed, the number and
    the path, so more samples leave the earlier trials unchanged.
    """
    parameters, rest = {}, number
    for path in sorted(space, reverse=True):
        domain = space[path]
        if domain.kind == GRID:
            rest, index = divmod(rest, len(domain.values))
            parameters[path] = domain.values[index]
        else:
            parameters[path] = _drawn(domain, _uniform(seed, number, path))
    return dict(sorted(parameters.items()))


def probes(space: Mapping[str, Domain], seed: int) -> Iterator[Parameters]:
    """Yield trials that represent all trials.

    The first trial comes first, then its variants with each listed value and each end of a range in turn. From a list
    of numbers only the smallest and the largest are used. The variants alternate between the parameters, so a caller
    that stops early has still tried some values of each.
    """
    first = parameters_of(space, seed, 0)
    yield first
    by_path = {path: _worth_trying(space[path]) for path in sorted(space)}
    for turn in itertools.zip_longest(*by_path.values(), fillvalue=_NONE_LEFT):
        for path, value in zip(by_path, turn, strict=True):
            if value is not _NONE_LEFT and value != first[path]:
                yield {**first, path: value}


def _worth_trying(domain: Domain) -> Sequence[Any]:
    if domain.kind not in LISTED:
        return domain.low, domain.high
    values = domain.values
    return (min(values), max(values)) if all(_is_number(value) for value in values) else values


def is_plain_field(path: str) -> bool:
    """Return whether `path` is a plain field.

    A plain field belongs to the specification itself, not to the arguments that are passed on.
    """
    return path in _FIELDS


def problems(space: Mapping[str, Domain]) -> list[Problem]:
    """Return the problems with the space itself. `repetitions` are not included. Paths are relative to `parameters`."""
    if not 1 <= len(space) <= MAX_PARAMETERS:
        return [("parameters", len(space), f"name 1 to {MAX_PARAMETERS} of them")]
    return [problem for path in sorted(space) for problem in _of_parameter(path, space[path])]


def repetitions(space: Mapping[str, Domain]) -> list[Problem]:
    """Return the values that a grid lists twice."""
    found = []
    for path, domain in sorted(space.items()):
        seen = set[str]()
        for index, value in enumerate(domain.values if domain.kind == GRID else ()):
            text = json.dumps(value, sort_keys=True)
            if text in seen:
                where = f"parameters[{path}].{GRID}.values[{index}]"
                found.append((where, value, "it is there twice; give each value once"))
            seen.add(text)
    return found


def with_values(config: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Return a training specification with these values.

    The specification is in its plain form, and `parameters` maps sweepable paths to values. Only the parts that change
    are copied.
    """
    whole = dict(config)
    settings = {path: value for path, value in parameters.items() if path.startswith(PROGRAM_CONFIG)}
    if settings:
        program = whole["program"]
        whole["program"] = {**program, "config_json": _with_settings(program["config_json"], settings)}
    own: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, value in parameters.items():
        if path in settings:
            continue
        *parents, last = path.split(".", 2 if ".kwargs." in path or ".scheduler_kwargs." in path else -1)
        part = whole
        for depth, parent in enumerate(parents, start=1):
            place = tuple(parents[:depth])
            if place not in own:
                own[place] = part[parent] = dict(part[parent])
            part = own[place]
        part[last] = value
    return whole


def _with_settings(config_json: str, settings: Parameters) -> str:
    """Return a program's configuration with `settings`.

    A path descends into nested objects and creates missing ones.
    """
    config: dict[str, Any] = json.loads(config_json or "{}")
    for path, value in settings.items():
        *parents, last = path.removeprefix(PROGRAM_CONFIG).split(".")
        part = config
        for parent in parents:
            inner = part.get(parent)
            part[parent] = part = dict(inner) if isinstance(inner, dict) else {}
        part[last] = value
    return json.dumps(config)


def kind_of(path: str) -> Callable[[Any], str] | None:
    """Return the check of values for a path.

    The check returns an empty string if the value fits, otherwise the remedy. The result is None if the path is not
    sweepable.
    """
    if path in _FIELDS:
        return _FIELDS[path]
    inside = any(path.startswith(one) and len(path) > len(one) for one in _OPEN)
    return _any_value if inside else None


def _of_parameter(path: str, domain: Domain) -> list[Problem]:
    where = f"parameters[{path}]"
    fits = kind_of(path)
    if fits is None:
        known = ", ".join([*sorted(_FIELDS), *(f"{one}*" for one in _OPEN)])
        return [(where, path, f"is no field that trials can have of their own; use one of {known}")]
    if domain.kind not in (*LISTED, UNIFORM, LOG_UNIFORM, INTEGERS):
        return [(where, None, "set one of grid, choice, uniform, log_uniform and integers")]
    where = f"{where}.{domain.kind}"
    if domain.kind in LISTED:
        return _of_values(where, domain, fits)
    return _of_range(where, domain, fits)


def _of_values(where: str, domain: Domain, fits: Callable[[Any], str]) -> list[Problem]:
    values = domain.values
    if not 1 <= len(values) <= MAX_VALUES:
        return [(f"{where}.values", len(values), f"give 1 to {MAX_VALUES:,} values")]
    return [
        (f"{where}.values[{index}]", value, remedy) for index, value in enumerate(values) if (remedy := fits(value))
    ]


def _of_range(where: str, domain: Domain, fits: Callable[[Any], str]) -> list[Problem]:
    low, high = domain.low, domain.high
    if not (math.isfinite(low) and math.isfinite(high)):
        return [(where, (low, high), "use finite numbers")]
    if domain.kind == LOG_UNIFORM and low <= 0:
        return [(f"{where}.low", low, "a logarithm needs numbers above 0")]
    if domain.kind == INTEGERS and not -MAX_WHOLE <= low <= high <= MAX_WHOLE and low <= high:
        return [(where, (low, high), f"use whole numbers of at most {MAX_WHOLE:,}")]
    if low > high or (low == high and domain.kind != INTEGERS):
        return [(where, (low, high), "low must be below high")]
    return [
        (f"{where}.{end}", value, remedy) for end, value in (("low", low), ("high", high)) if (remedy := fits(value))
    ]


def _drawn(domain: Domain, chance: float) -> Any:
    """Return the value that `chance`, in [0, 1), selects."""
    if domain.kind == CHOICE:
        return domain.values[int(chance * len(domain.values))]
    if domain.kind == INTEGERS:
        return int(domain.low) + int(chance * (int(domain.high) - int(domain.low) + 1))
    if domain.kind == LOG_UNIFORM:
        low, high = math.log(domain.low), math.log(domain.high)
        return min(max(math.exp(low + chance * (high - low)), domain.low), domain.high)
    return min(domain.low + chance * (domain.high - domain.low), domain.high)


def _uniform(seed: int, number: int, path: str) -> float:
    """Return a reproducible number in [0, 1). It is the same with every release of every library."""
    digest = hashlib.sha256(f"{seed}/{number}/{path}".encode()).digest()
    return float((int.from_bytes(digest[:8]) >> (64 - MANTISSA_BITS)) / 2**MANTISSA_BITS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> str:
    return "" if _is_number(value) and math.isfinite(value) else "use a finite number"


def _whole(value: Any) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) else "use a whole number"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value else "use a name"


def _any_value(value: Any) -> str:
    return "null is no value; leave it out" if value is None else ""


def _one_of(*names: str) -> Callable[[Any], str]:
    return lambda value: "" if value in names else f"use one of {', '.join(names)}"


# Sweepable fields by path. The checks of the trial's job validate the value itself.
_FIELDS: dict[str, Callable[[Any], str]] = {
    "accumulation_steps": _whole,
    "epochs": _whole,
    "global_batch_size": _whole,
    "loss.label_smoothing": _number,
    "loss.name": _text,
    "max_gradient_norm": _number,
    "model.builder": _text,
    "optimizer.learning_rate": _number,
    "optimizer.name": _text,
    "optimizer.schedule": _one_of(CONSTANT, COSINE_WITH_WARMUP),
    "optimizer.scheduler": _text,
    "precision": _one_of(FLOAT32, BFLOAT16, FLOAT16, TF32),
    "seed": _whole,
    "training_step": _text,
}
_OPEN = ("loss.kwargs.", "model.kwargs.", "optimizer.kwargs.", "optimizer.scheduler_kwargs.", PROGRAM_CONFIG)
# Other fields that may differ between a program's trials.
OF_PROGRAMS = ("seed",)
