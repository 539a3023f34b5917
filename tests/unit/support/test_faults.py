from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.faults import Faults, fault_table


def reports(test: str, *faults: tuple[str, str, str, int], failed: bool = False) -> list[Any]:
    """Of one test: its call, and its end, both with the properties so far."""
    properties: list[tuple[str, object]] = [("counted", "something else")]
    for fault in faults:
        Faults(lambda name, value: properties.append((name, value))).add(*fault)
    return [
        SimpleNamespace(nodeid=f"tests/fault/{test}", when=when, failed=failed and when == "call", user_properties=had)
        for when, had in (("call", properties[:-1]), ("teardown", properties))
    ]


def test_faults_of_one_kind_stage_and_store_are_added_up_once_a_test() -> None:
    table = fault_table(
        [
            *reports("test_data_a.py::test_x[1]", ("SIGKILL service", "import", "file", 2)),
            *reports("test_data_b.py::test_y", ("SIGKILL service", "import", "file", 1), failed=True),
            *reports("test_train_a.py::test_z", ("SIGKILL worker", "training", "s3-minio", 10)),
            SimpleNamespace(nodeid="tests/unit/test_a.py"),
        ]
    )
    assert [line.split() for line in table[1:]] == [
        ["data", "SIGKILL", "service", "import", "file", "3", "2", "1"],
        ["train", "SIGKILL", "worker", "training", "s3-minio", "10", "1", "0"],
        ["all", "13", "3", "1"],
    ]
    assert len({line.rstrip().rfind(" ") for line in table if "SIGKILL" in line}) == 1, "columns are under each other"


def test_no_fault_makes_no_table() -> None:
    assert fault_table(reports("test_data_a.py::test_x")) == []
