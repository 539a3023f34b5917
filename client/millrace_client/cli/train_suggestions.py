"""What `millrace train create` trains where options leave it open: suggested, prepared and explained."""

from __future__ import annotations

from collections.abc import Sequence

import click
from google.protobuf import json_format

from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2
from millrace_client.cli.command import CommandFailed, console, new_table, print_json, verbatim
from millrace_client.cli.versions import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.connection import Millrace
from millrace_client.suggestions import Making, Suggestion, prepared_suggestion


def suggested(millrace: Millrace, given: resources_pb2.TrainingSpec, dry_run: bool, quiet: bool) -> Suggestion:
    """The whole specification, with the version prepared that it needs; of a dry run as far as it goes without.

    Raises what the services answer, and `CommandFailed` where the prepared version needs another preparation.
    """
    suggestion = millrace.train.suggest_training_spec(given.dataset_version, spec=given)
    if not quiet:
        _show_choices(suggestion.choices)
    if dry_run or suggestion.preparation is None:
        return suggestion

    def wait(operation: Making) -> data_pb2.DatasetVersion:
        with waiting(operation):
            if quiet:
                return operation.wait(AS_LONG_AS_IT_TAKES_S)
            with console().status(f"preparing {operation.metadata.version} …"):
                return operation.wait(AS_LONG_AS_IT_TAKES_S)

    def ask(version: str, spec: resources_pb2.TrainingSpec | None) -> suggestion_pb2.SuggestTrainingSpecResponse:
        return millrace.train.ask_for_suggestion(version, spec)

    prepared = prepared_suggestion(ask, millrace.data, suggestion, wait)
    if not quiet:
        console().print(f"[bold]{prepared.version}[/] is prepared from {given.dataset_version}.")
        _show_choices(prepared.choices[len(suggestion.choices) :])
    if prepared.preparation is not None:
        raise CommandFailed(
            f"{prepared.version} needs preparing, too",
            remedy="look at it with --dry-run, and prepare it with millrace data transform",
        )
    return prepared


def show_dry_run(suggestion: Suggestion, as_json: bool) -> None:
    """The specification and, where there is one, the preparation; as JSON with the choices."""
    preparation = suggestion.preparation
    if as_json:
        document = {"spec": suggestion.spec, "choices": list(suggestion.choices)}
        print_json({**document, "preparation": preparation} if preparation else document)
        return
    click.echo(json_format.MessageToJson(suggestion.spec, preserving_proto_field_name=True))
    if preparation is not None:
        click.echo("A version is made first, and what is not here yet follows from it:")
        click.echo(json_format.MessageToJson(preparation, preserving_proto_field_name=True))
    click.echo("Nothing was made.")


def _show_choices(choices: Sequence[suggestion_pb2.Choice]) -> None:
    if not choices:
        return
    table = new_table("field", "chosen", "why")
    for one in choices:
        table.add_row(*(verbatim(text) for text in (one.field, one.value, one.reason)))
    console().print(table)
