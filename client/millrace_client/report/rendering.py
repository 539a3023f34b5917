"""How a page is made of a template: no script, no other file, no network, and everything from data escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def rendered(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("millrace_client.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)
