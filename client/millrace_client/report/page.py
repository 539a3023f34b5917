"""A version's report as one HTML page: no script, no other file, no network."""

from __future__ import annotations

from millrace.data.v1 import data_service_pb2
from millrace_client.cli.output import size_text
from millrace_client.report.bars import HEIGHT, WIDTH, box_bars
from millrace_client.report.profile import profile_of
from millrace_client.report.rendering import rendered

TEMPLATE = "page.html.jinja"


def page(preview: data_service_pb2.PreviewVersionResponse) -> str:
    return rendered(TEMPLATE, {"size": size_text, "bars": box_bars}, profile=profile_of(preview), box=(WIDTH, HEIGHT))
