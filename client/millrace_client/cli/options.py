"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from millrace_client.connection import Millrace, connect

# Long enough for a service that restarts; a command with no stack up fails soon.
RECONNECT_FOR_S = 5.0

Function = TypeVar("Function", bound=Callable[..., Any])


# What a protobuf Duration holds, either way.
MAX_DURATION_S = 315_576_000_000


class DurationType(click.types.FloatParamType):
    """A number of seconds, or of less than these, that a Duration holds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= MAX_DURATION_S:
            self.fail(f"{value!r}: use a finite number, up to {MAX_DURATION_S}", param, ctx)
        return number


def json_option(function: Function) -> Function:
    """`--json`, handed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")(function)


def address_options(function: Function) -> Function:
    """The three addresses, handed on as `data_address`, `train_address`, `inference_address`."""
    for service in ("inference", "train", "data"):
        function = click.option(
            f"--{service}-address",
            metavar="HOST:PORT",
            help=f"Where the {service} service answers.",
        )(function)
    return function


def connected(values: dict[str, Any]) -> Millrace:
    """A client for the addresses that `address_options` put into a command's keyword arguments."""
    return connect(
        data=values["data_address"],
        train=values["train_address"],
        inference=values["inference_address"],
        reconnect_for_s=RECONNECT_FOR_S,
    )


def was_given(option: str) -> bool:
    """Whether the option of that name, as it is handed on, was given to the command that runs."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def full_name(collection: str, name: str) -> str:
    """`datasets/digits` for `digits` as well as for `datasets/digits`."""
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"
