"""`millrace up`, `down` and `status`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from millrace.train.v1.train_service_pb2 import ClusterUse
from millrace_client.calls import SERVICES, millrace_home
from millrace_client.cli.command import (
    UNAVAILABLE,
    PlainCommand,
    address_options,
    connected,
    console,
    duration_text,
    json_option,
    new_table,
    print_json,
    state_text,
    verbatim,
)
from millrace_client.connection import Millrace
from millrace_client.errors import MillraceError, Unauthenticated
from millrace_client.stack import supervisor as stack_supervisor
from millrace_client.stack.record import Record
from millrace_client.stack.supervisor import StackOptions, Supervisor, answers, hold_home, make_plan, say_with_time

PARTS = ("ray", *SERVICES)
# The service's reconciler writes the cluster's use at least each minute.
STALE_AFTER_S = 90.0


@click.command(cls=PlainCommand)
@click.option("--store", default="", metavar="URL", help="file:///folder or s3://bucket/prefix.  [MILLRACE_STORE]")
@click.option(
    "--import-root",
    "import_roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder that imports may read; may be given again. Default: the working directory.  [MILLRACE_IMPORT_ROOTS]",
)
@click.option("--ray-cpus", default=0, metavar="N", help="CPUs that Ray hands out. Default: the cores, at least 4.")
@click.option("--foreground", is_flag=True, help="Stay, and stop on Ctrl-C.")
@json_option
def up(store: str, import_roots: tuple[Path, ...], ray_cpus: int, foreground: bool, as_json: bool) -> None:
    """Start Ray and the three services on this machine, on loopback.

    State and logs are in MILLRACE_HOME (default: .millrace in the working directory).
    """
    home = millrace_home()
    options = StackOptions(store=store, import_roots=import_roots or _default_roots(), ray_cpus=ray_cpus)
    if foreground:
        _run_here(home, options)
        return
    running = stack_supervisor.running_record(home)
    record = running or start_with_progress(home, options, quiet=as_json).record
    if as_json:
        print_json({"already_running": running is not None, **_as_document(home, record)})
        return
    console().print("It is already running." if running else "The stack is up.")
    print_addresses(record)
    console().print(f"\nIts logs are in {home / 'logs'}; [bold]millrace down[/] stops it.")


@click.command(cls=PlainCommand)
@json_option
def down(as_json: bool) -> None:
    """Stop what `millrace up` started, and all that it left behind."""
    home = millrace_home()
    if as_json:
        print_json({"stopped": stack_supervisor.stop(home)})
        return
    with console().status("stopping …"):
        stopped = stack_supervisor.stop(home)
    console().print("Stopped; nothing of it is left running." if stopped else f"Nothing is running in {home}.")


@click.command(cls=PlainCommand)
@address_options
@json_option
@click.pass_context
def status(ctx: click.Context, /, as_json: bool, **values: Any) -> None:
    """Show whether each part answers, and who holds which CPUs and GPUs. Exit code 5 where a part does not answer."""
    record = stack_supervisor.running_record(millrace_home())
    with connected(values) as millrace:
        health = {service: millrace.health.check(service) for service in SERVICES}
        addresses = millrace.addresses
        refusal: Unauthenticated | None = None
        use, names = None, {}
        try:
            use = _cluster_use(millrace) if health["train"] == "SERVING" else None
            names = _deployment_names(millrace, health["inference"]) if use else {}
        except Unauthenticated as error:
            # Health needs no token, so it is still shown.
            refusal = error
    rows = [
        (service, health[service], addresses.address_of(service), addresses.origins[service]) for service in SERVICES
    ]
    if record is not None:
        ray = "SERVING" if answers(record.ray_address) else "UNREACHABLE"
        rows.insert(0, ("ray", ray, record.ray_address, "stack"))
    healthy = all(state == "SERVING" for _, state, _, _ in rows)
    if as_json:
        parts = [
            {"part": part, "health": state, "address": address, "named_by": origin}
            for part, state, address, origin in rows
        ]
        stack = _as_document(millrace_home(), record) if record else None
        document = {"healthy": healthy, "parts": parts, "stack": stack}
        if use is not None:
            document["cluster"] = _use_document(use, names)
        if refusal is not None:
            document["refusal"] = refusal.as_dict()
        print_json(document)
    else:
        table = new_table("part", "health", "address", "pid", "named by", numbers=("pid",))
        for part, state, address, origin in rows:
            pid = str(record.parts[part].pid) if record and origin == "stack" and part in record.parts else ""
            table.add_row(part, state_text(state), address, pid, origin)
        console().print(table)
        if use is not None:
            _print_use(use, names)
        if refusal is not None:
            console().print(verbatim(f"Who holds which CPUs is not shown: {refusal.message}", "yellow"), soft_wrap=True)
            console().print(verbatim(f"  remedy: {refusal.remedy}"), soft_wrap=True)
        if record is not None:
            console().print(f"Ray's dashboard: {record.dashboard}\nStore: {record.store}")
    ctx.exit(0 if healthy else UNAVAILABLE)


def _cluster_use(millrace: Millrace) -> ClusterUse | None:
    """Return the cluster's use; None if it is not known yet, or the service is an earlier release.

    Raises `Unauthenticated`.
    """
    try:
        use = millrace.train.get_cluster_use()
    except Unauthenticated:
        raise
    except MillraceError:
        return None
    return use if use.HasField("time") else None


def _deployment_names(millrace: Millrace, health: str) -> dict[str, str]:
    """Return the deployments' names by uid."""
    if health != "SERVING":
        return {}
    try:
        return {deployment.uid: deployment.name for deployment in millrace.deployments.list_deployments()}
    except Unauthenticated:
        raise
    except MillraceError:
        return {}


def _holder(holder: ClusterUse.Holder, names: dict[str, str]) -> str:
    of_deployment = holder.deployment_uid and names.get(holder.deployment_uid, f"a deployment, {holder.deployment_uid}")
    return holder.job or of_deployment or holder.description


def _use_document(use: ClusterUse, names: dict[str, str]) -> dict[str, Any]:
    return {
        "as_of": use.time.ToJsonString(),
        "nodes": use.nodes,
        "total": {"cpus": use.cpus, "gpus": use.gpus},
        "free": {"cpus": use.free_cpus, "gpus": use.free_gpus},
        "holders": [
            {"holder": _holder(holder, names), "cpus": holder.cpus, "gpus": holder.gpus} for holder in use.holders
        ],
    }


def _print_use(use: ClusterUse, names: dict[str, str]) -> None:
    table = new_table("of the Ray cluster", "CPUs", "GPUs", numbers=("CPUs", "GPUs"))
    for holder in use.holders:
        table.add_row(verbatim(_holder(holder, names)), f"{holder.cpus:g}", f"{holder.gpus:g}")
    table.add_row("free", f"{use.free_cpus:g} of {use.cpus:g}", f"{use.free_gpus:g} of {use.gpus:g}")
    console().print(table)
    age_s = time.time() - use.time.ToNanoseconds() / 1e9
    if age_s > STALE_AFTER_S:
        console().print(f"[yellow]as of {duration_text(age_s)} ago: not updated since[/]")


def start_with_progress(
    home: Path, options: StackOptions, *, quiet: bool = False, lifeline: bool = False
) -> stack_supervisor.Stack:
    """Start a stack, and show which parts already answer."""
    if quiet:
        return stack_supervisor.start(home, options, lifeline=lifeline)
    with console().status("starting Ray …") as line:

        def show(record: Record) -> None:
            missing = [part for part in PARTS if part not in record.answering]
            line.update(f"starting {', '.join(missing).replace('ray', 'Ray')} …" if missing else "ready")

        return stack_supervisor.start(home, options, lifeline=lifeline, on_progress=show)


def print_addresses(record: Record) -> None:
    table = new_table("service", "address")
    for service in SERVICES:
        table.add_row(service, record.addresses[service])
    table.add_row("Ray's dashboard", record.dashboard)
    console().print(table)


def _default_roots() -> tuple[Path, ...]:
    return () if os.environ.get("MILLRACE_IMPORT_ROOTS") else (Path.cwd(),)


def _run_here(home: Path, options: StackOptions) -> None:
    with hold_home(home):
        stack_supervisor.stop(home)  # removes what a killed supervisor left behind
        supervisor = Supervisor(make_plan(home, options), say_with_time, owns_process=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: supervisor.stop())
        supervisor.run()


def _as_document(home: Path, record: Record) -> dict[str, Any]:
    return {
        "home": str(home),
        "state": record.state,
        "supervisor_pid": record.supervisor.pid,
        "addresses": dict(record.addresses),
        "store": record.store,
        "ray_address": record.ray_address,
        "dashboard": record.dashboard,
        "parts": {name: process.pid for name, process in record.parts.items()},
    }
