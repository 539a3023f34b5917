"""`millrace bench`: measures a served model's speed, and its behaviour under overload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace_client.cli.command import (
    FAILED,
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    json_option,
    new_table,
    print_json,
)

if TYPE_CHECKING:
    from millrace_client.load import Measured

# The number of generated rows, which are sent again and again.
MADE_UP_ROWS = 256
LATE_TEXT = "late (ended by this client's own timer)"
FIGURES = ("calls", "share", "p50", "p90", "p95", "p99", "p99.9", "max")


@click.command(cls=PlainCommand)
@click.argument("model")
@click.option(
    "--in-flight", type=click.IntRange(1), help="Closed loop: so many requests on the way at once. Default: 64."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Open loop: so many requests a second, whatever comes back, at random times.",
)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option("--warm-up", type=click.FloatRange(0), default=1.0, show_default=True, help="Seconds not counted.")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="In seconds.")
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="Rows in a request.")
@click.option(
    "--rows-from",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Rows of a .npy, .npz or .parquet, instead of made-up ones.",
)
@click.option("--version", default="", help="One version of the model, not as its deployment routes.")
@click.option("--seed", default=0, show_default=True, help="Of made-up rows, and of the times of --rate.")
@address_options
@json_option
def bench(
    model: str,
    in_flight: int | None,
    rate: float | None,
    seconds: float,
    warm_up: float,
    deadline: float,
    rows: int,
    rows_from: Path | None,
    version: str,
    seed: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Load MODEL, and print its throughput, latencies and what its answers were."""
    from millrace_client.load import Plan, closed_loop, made_up_rows, open_loop, requests_of, rows_of_file
    from millrace_client.rows.typed import BadInput

    if in_flight is not None and rate is not None:
        raise click.UsageError("give either --in-flight (closed loop) or --rate (open loop)")
    with connected(values) as millrace:
        metadata = millrace.inference.model_metadata(model, version=version)
        address, headers = millrace.addresses.inference, millrace.authorization
    try:
        if rows_from is None:
            given = made_up_rows(metadata, max(MADE_UP_ROWS, rows), seed)
        else:
            given = rows_of_file(metadata, rows_from)
        requests = requests_of(model, given, rows, version=version)
    except BadInput as error:
        raise CommandFailed(str(error), remedy=error.remedy or "--rows-from names a file of rows") from None
    plan = Plan(
        address=address,
        requests=requests,
        rows_per_request=rows,
        seconds=seconds,
        warm_up_s=warm_up,
        deadline_s=deadline,
        metadata=headers,
    )
    loop = {"rate": rate} if rate is not None else {"in_flight": in_flight or 64}
    try:
        measured = open_loop(plan, rate, seed) if rate is not None else closed_loop(plan, in_flight or 64)
    except TimeoutError as error:
        raise CommandFailed(str(error), remedy="`millrace status` shows what is up") from None
    if as_json:
        print_json({"model": model, **loop, "rows": rows, "deadline_s": deadline, **measured.as_dict()})
    else:
        _print(measured, rate)
    if not measured.with_status("OK"):
        click.echo("error: no request was answered\n  remedy: `millrace predict` shows why", err=True)
        raise click.exceptions.Exit(FAILED)


def _print(measured: Measured, rate: float | None) -> None:
    table = new_table("status", *FIGURES, numbers=FIGURES)
    for status, count in measured.statuses.items():
        latency_ms = measured.latency_ms(status)
        name = LATE_TEXT if status == "LATE" else f"[{'green' if status == 'OK' else 'red'}]{status}[/]"
        figures = (f"{one:.1f} ms" for one in latency_ms.values())
        table.add_row(name, f"{count:,}", f"{measured.share(status):.2%}", *figures)
    console().print(table)
    rows = measured.rows_per_request
    each = f", {measured.answered_per_s * rows:,.0f} rows/s" if rows > 1 else ""
    console().print(f"[bold]{measured.answered_per_s:,.1f}[/] answers/s{each}, over {measured.seconds:g} s")
    if rate is not None:
        behind = measured.behind_ms()
        console().print(f"this client sent {behind['p50']:.1f} ms (p50), {behind['p99']:.1f} ms (p99) later than due")
