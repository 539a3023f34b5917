"""The `millrace` command. `main` is its entry point.

A command's module is imported when that command runs.
"""

from __future__ import annotations

import importlib
from typing import NoReturn

import click

# The help of each command stands here, so that `millrace --help` imports no command.
COMMANDS = {
    "up": ("stack", "Start Ray and the three services on this machine."),
    "down": ("stack", "Stop what `millrace up` started."),
    "status": ("stack", "Show whether each part answers."),
    "demo": ("demo", "From raw digits to a served model."),
    "data": ("data", "Import, list and show datasets."),
    "code": ("code", "Push, list, show and delete bundles of your own code."),
    "train": ("train", "Create, watch and end training jobs; coverage, metrics, logs."),
    "deploy": ("deployments", "Serve a checkpoint."),
    "deployments": ("deployments", "List, show and delete deployments; share their traffic out."),
    "rollout": ("deployments", "Move a deployment to another checkpoint, step by step."),
    "rollback": ("deployments", "Give a deployment's traffic back to the version before."),
    "predict": ("predict", "Ask a served model about images, CSV or Parquet."),
    "bench": ("predict", "Load a served model, and measure it."),
}

EPILOG = """\b
Where the services are, first that is named:
  --data-address, --train-address, --inference-address
  MILLRACE_DATA_ADDRESS, MILLRACE_TRAIN_ADDRESS, MILLRACE_INFERENCE_ADDRESS
  the stack that `millrace up` runs (stack.json in MILLRACE_HOME, default .millrace)
  127.0.0.1:50051, 127.0.0.1:50052, 127.0.0.1:50053

\b
The services' token, where they demand one: in the file that MILLRACE_TOKEN_FILE names.

\b
Exit codes:
  0  done                     4  refused: a value, a conflict, a wrong state
  1  failed                   5  a service is unavailable or too slow
  2  wrong usage            130  interrupted
  3  not found
"""


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"millrace_client.cli.{COMMANDS[name][0]}")
        command = getattr(module, name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="millrace", prog_name="millrace")
def millrace() -> None:
    """From raw data to a served model: data, training and inference over gRPC."""


def main() -> NoReturn:
    millrace(prog_name="millrace")
    raise AssertionError("click ends the process")
