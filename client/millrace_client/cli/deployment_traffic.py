"""`millrace deployments traffic`: which version gets which requests, and which versions stay loaded."""

from __future__ import annotations

from typing import Any

import click

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.cli.deployment_view import print_deployment
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import print_json
from millrace_client.cli.version_keeping import keep_option
from millrace_client.deployments import keep_named

# The version of a shadow of 0 % is nobody's.
NO_SHADOW = "", 0


class SharesType(click.ParamType[tuple[str, int]]):
    """`2=5`: a version, and how much it gets."""

    def __init__(self, name: str, example: str) -> None:
        self.name = name
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        version, _, share = str(value).partition("=")
        if not (version and share.isascii() and share.isdecimal() and int(share) < 2**31):
            self.fail(f"{value!r}: use {self.name}, e.g. {self._example}", param, ctx)
        return version, int(share)


class RouteType(click.ParamType[tuple[str, str, str]]):
    """`x-canary=yes:2`: a header, its whole value, and the version that such requests go to."""

    name = "HEADER=VALUE:VERSION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str, str]:
        header, _, rest = str(value).partition("=")
        wanted, _, version = rest.rpartition(":")
        if not (header and wanted and version):
            self.fail(f"{value!r}: use {self.name}, e.g. x-canary=yes:2", param, ctx)
        return header, wanted, version


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.option(
    "--weight",
    "weights",
    type=SharesType("VERSION=WEIGHT", "2=5"),
    multiple=True,
    help="Share of the requests that name no version, 0 to 1000; versions that are not named get none.",
)
@click.option(
    "--route",
    "routes",
    type=RouteType(),
    multiple=True,
    help="Requests with this header go to that version. Takes the place of all routes before.",
)
@click.option("--no-routes", is_flag=True, help="No routes by header.")
@click.option(
    "--shadow",
    type=SharesType("VERSION=PERCENT", "2=10"),
    help="A version without traffic that gets copies of so many requests, whose answers nobody gets.",
)
@click.option("--no-shadow", is_flag=True, help="No copies.")
@keep_option("as it is")
@click.option("--keep-version", "kept", metavar="VERSION", multiple=True, help="Keep this one loaded without traffic.")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def traffic(
    deployment: str,
    weights: tuple[tuple[str, int], ...],
    routes: tuple[tuple[str, str, str], ...],
    no_routes: bool,
    shadow: tuple[str, int] | None,
    no_shadow: bool,
    version_policy: pb.VersionPolicy | None,
    kept: tuple[str, ...],
    etag: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Share the requests of DEPLOYMENT out among its versions; what no option names stays as it is.

    A request goes to the version that it names, else by the first route that fits, else by weight. While a roll-out is
    under way the weights are its own.
    """
    _either("--route", routes, "--no-routes", no_routes)
    _either("--shadow", shadow, "--no-shadow", no_shadow)
    _either("--keep", version_policy, "--keep-version", kept)
    if kept:
        version_policy = keep_named(*kept)
    if not (weights or routes or no_routes or shadow or no_shadow or version_policy):
        raise click.UsageError("say what is to be otherwise: --weight, --route, --shadow, --keep, …")
    with connected(values) as millrace:
        now = millrace.deployments.update_traffic(
            full_name("deployments", deployment),
            weights=_by_version(weights) if weights else None,
            routes=routes if routes or no_routes else None,
            shadow=NO_SHADOW if no_shadow else shadow,
            version_policy=version_policy,
            etag=etag,
        )
    if as_json:
        print_json(now)
    else:
        print_deployment(now)


def _either(one: str, given: object, other: str, other_given: object) -> None:
    if given and other_given:
        raise click.UsageError(f"give either {one} or {other}")


def _by_version(weights: tuple[tuple[str, int], ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for version, weight in weights:
        if version in found:
            raise click.UsageError(f"version {version} has several weights")
        found[version] = weight
    return found
