"""`millrace data upload`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json, size_text
from millrace_client.uploads import UploadInterrupted


@click.command(cls=PlainCommand)
@click.argument("dataset")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--id", "upload_id", default="", help="Default: one that the server chooses.")
@click.option("--resume", default="", metavar="UPLOAD", help="Go on with this upload of the same file.")
@click.option("--presigned", is_flag=True, help="Straight into the store, which must be S3: for bulk.")
@address_options
@json_option
def upload(
    dataset: str, file: Path, upload_id: str, resume: str, presigned: bool, as_json: bool, **values: Any
) -> None:
    """Send FILE to the server, into DATASET, which is made where it does not exist.

    `millrace data import DATASET --csv train=UPLOAD` then reads it, any number of times within 7 days.
    """
    name = full_name("datasets", dataset)
    with connected(values) as millrace, console().status(f"sending {file.name} …") as line:

        def tell(durable_bytes: int, total_bytes: int | None) -> None:
            of = f" of {size_text(total_bytes)}" if total_bytes is not None else ""
            line.update(f"sending {file.name} … {size_text(durable_bytes)}{of}")

        try:
            if resume:
                sent = millrace.data.resume_upload(resume, file, on_progress=tell)
            else:
                millrace.data.create_dataset(name.removeprefix("datasets/"), exist_ok=True)
                send = millrace.data.upload_presigned if presigned else millrace.data.upload
                sent = send(name, file, upload_id=upload_id, on_progress=tell)
        except UploadInterrupted as interrupted:
            raise CommandFailed(
                f"interrupted; {interrupted.name} stays open for 24 hours",
                remedy=f"millrace data upload {dataset} {file} --resume {interrupted.name}",
                code=130,
            ) from None
    if as_json:
        print_json(sent)
    else:
        console().print(f"{sent.name}  {size_text(sent.size_bytes)}  sha256 {sent.sha256}", soft_wrap=True)
