"""`--keep`: which versions of a deployment stay loaded without traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.deployments import keep_all, keep_latest

Function = TypeVar("Function", bound=Callable[..., Any])


class KeepType(click.ParamType[pb.VersionPolicy]):
    """`2`: so many of the newest versions; `all`."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> pb.VersionPolicy:
        text = str(value)
        if text == "all":
            return keep_all()
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
            self.fail(f"{value!r}: use a number from 1 on, or all", param, ctx)
        return keep_latest(int(text))


def keep_option(default: str) -> Callable[[Function], Function]:
    """`--keep`, handed on as `version_policy`, None where it is left out; `default` says what holds then."""
    help_text = f"Keep so many of the newest versions loaded, or all, without traffic too. Default: {default}."
    return click.option("--keep", "version_policy", type=KeepType(), metavar=KeepType.name, help=help_text)


def policy_text(policy: pb.VersionPolicy) -> str:
    """What stays loaded, as a sentence."""
    chosen = policy.WhichOneof("choice")
    if chosen == "all":
        return "all versions stay loaded without traffic"
    if chosen == "named":
        named = ", ".join(policy.named.versions) or "none"
        return f"of the versions without traffic these stay loaded: {named}"
    count = policy.latest.count or 1
    latest = "the latest version stays" if count == 1 else f"the latest {count} versions stay"
    return f"{latest} loaded without traffic"
