"""Checks of users' own code in the tests' process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_models import code_of_this_process
from train_service.jobs import entry_child, own_code


def check_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check entries of code bundles in this process.

    A child would import torch first, which takes longer than all the rest.
    """

    def ask(question: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        folder, modules, arguments = Path(question["folder"]), set(sys.modules), sys.argv
        with code_of_this_process():
            try:
                return entry_child._answer({**question, "path": [one for one in sys.path if one]})
            finally:
                sys.argv = arguments
                # Another bundle may have a module of the same name.
                for name in set(sys.modules) - modules:
                    if Path(str(getattr(sys.modules[name], "__file__", None))).is_relative_to(folder):
                        del sys.modules[name]

    monkeypatch.setattr(own_code, "ask_in_child", ask)
