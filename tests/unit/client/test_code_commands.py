"""`millrace code push|list|show|delete` and `millrace train run`, on the service's own servicer and a real store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import code_bundle_pb2
from millrace_client.cli import code
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.code_folders import LOOP, write_files
from tests.support.own_code_checks import check_in_this_process
from tests.support.own_models import NET
from tests.support.train_server import commanded
from tests.unit.train_service.learners import VERSION, commit_table


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "code", {"train.py": LOOP, "requirements.txt": "numpy>=1\n", ".git/HEAD": ""})


def pushed(store: ObjectStore, folder: Path) -> str:
    result = commanded(store, "code", "push", str(folder), "--json")
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["name"])


def test_a_pushed_folder_is_listed_shown_and_deleted(store: ObjectStore, folder: Path) -> None:
    name = pushed(store, folder)
    assert re.fullmatch("codeBundles/[0-9a-f]{64}", name)
    assert name in commanded(store, "code", "push", str(folder)).stdout
    listed = json.loads(commanded(store, "code", "list", "--json").stdout)["code_bundles"]
    assert [(one["name"], one["file_count"], one["modules"]) for one in listed] == [(name, 2, ["train"])]
    shown = commanded(store, "code", "show", name.partition("/")[2]).stdout
    assert "module train" in shown
    assert "requires numpy>=1" in shown
    assert commanded(store, "code", "delete", name, answer="n\n").exit_code != 0
    assert json.loads(commanded(store, "code", "delete", name, "--json").stdout) == {"deleted": name}
    assert commanded(store, "code", "list").stdout == "None yet.\n"
    assert commanded(store, "code", "show", name).exit_code == 3


def test_a_file_that_cannot_be_packed_is_reported_by_its_path(store: ObjectStore, folder: Path) -> None:
    (folder / "data").symlink_to("/etc")
    result = commanded(store, "code", "push", str(folder))
    assert result.exit_code == 1
    assert "'data' is a symbolic link" in " ".join(result.output.split())
    assert list(store.list()) == []


def test_a_service_that_runs_no_code_of_callers_says_how_to_allow_it(store: ObjectStore, folder: Path) -> None:
    result = commanded(store, "code", "push", str(folder), own_code=False)
    assert result.exit_code == 4
    assert "MILLRACE_OWN_CODE=trusted" in " ".join(result.output.split())
    assert list(store.list()) == []


def test_run_pushes_the_folder_and_creates_a_job_of_it(store: ObjectStore, folder: Path) -> None:
    settings = ("--config", "lr=0.1", "--config", "layers=[1,2]", "--config", "name=small", "--workers", "3")
    result = commanded(store, "train", "run", f"{folder}:train:loop", *settings, "--best-metric", "loss", "--json")
    assert result.exit_code == 0, result.output
    job = json.loads(result.stdout)
    assert re.fullmatch("trainingJobs/train-[0-9a-f]{8}", job["name"])
    program = job["spec"]["program"]
    assert program["code_bundle"] == pushed(store, folder)
    assert json.loads(program["config_json"]) == {"lr": 0.1, "layers": [1, 2], "name": "small"}
    assert job["spec"]["num_workers"] == 3
    assert job["spec"]["checkpoints"]["best_metric"] == "loss"
    listed = commanded(store, "train", "list")
    assert listed.exit_code == 0
    assert job["name"] in listed.stdout


def test_the_options_of_a_run_are_fields_of_its_specification(store: ObjectStore, folder: Path) -> None:
    shape = ("--workers", "1..4", "--data-resume", "continue", "--remainder", "keep", "--backend", "gloo")
    options = (*shape, "--hang-after", "90.5", "--stop-within", "60", "--timeout", "120")
    result = commanded(store, "train", "run", f"{folder}:train:loop", *options, "--json")
    assert result.exit_code == 0, result.output
    spec = json.loads(result.stdout)["spec"]
    assert (spec["num_workers"], spec["min_workers"]) == (4, 1)
    program = spec["program"]
    assert (program["data_resume"], program["remainder"]) == ("DATA_RESUME_CONTINUE", "REMAINDER_KEEP")
    assert (program["hang_after"], program["stop_within"]) == ("90.500s", "60s")
    assert (spec["placement"]["backend"], spec["placement"]["timeout"]) == ("gloo", "120s")


def test_a_script_says_what_the_options_leave_open(store: ObjectStore, folder: Path) -> None:
    script = write_files(folder, {"cells.py": "import json\n"}) / "cells.py"
    function = commanded(store, "train", "run", f"{folder}:train:loop", "--json")
    assert json.loads(function.stdout)["spec"]["num_workers"] == 2
    opened = json.loads(commanded(store, "train", "run", str(script), "--no-watch", "--json").stdout)["spec"]
    assert not {"num_workers", "max_failures", "lanes"} & set(opened)
    assert (opened["checkpoints"], opened["placement"]) == ({}, {})
    given = commanded(store, "train", "run", str(script), "--no-watch", "--workers", "3", "--json")
    assert json.loads(given.stdout)["spec"]["num_workers"] == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--min-workers", "2"), "--min-workers 2 needs the most, too; use --workers 2..MAX"),
        (("--workers", "1..4", "--min-workers", "2"), "--workers MIN..MAX has the fewest already"),
        (("--config", "lr=0,001"), "numbers have a point, e.g. lr=0.001; a list is lr=[0,001]"),
        (("--hang-after", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_a_wrong_option_of_a_run_is_reported_before_anything_is_pushed(
    store: ObjectStore, folder: Path, options: tuple[str, ...], text: str
) -> None:
    result = commanded(store, "train", "run", f"{folder}:train:loop", *options)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())
    assert list(store.list()) == []


def test_a_dry_run_is_checked_by_the_service_and_makes_no_job(store: ObjectStore, folder: Path) -> None:
    result = commanded(store, "train", "run", f"{folder}:train:loop", "--job", "mine", "--dry-run")
    assert result.exit_code == 0, result.output
    assert '"num_workers": 2' in result.stdout
    assert "The service would make trainingJobs/mine of it." in result.stdout
    wrong = commanded(store, "train", "run", f"{folder}:train:nothing", "--dry-run")
    assert wrong.exit_code == 4
    assert "nothing" in wrong.output
    assert json.loads(commanded(store, "train", "list", "--json").stdout)["training_jobs"] == []


@pytest.mark.parametrize("entry", ["train.py:loop", "{folder}/train.py:loop", "{folder}:train.py:loop"])
def test_a_function_may_be_named_by_its_file(
    store: ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(folder)
    result = commanded(store, "train", "run", entry.format(folder=folder), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["spec"]["program"]["entry"] == "train:loop"


@pytest.mark.parametrize(
    ("answer", "person", "state", "text"),
    [
        ("cancel\n", True, "STATE_CANCELLING", "is asked to stop at its next report"),
        ("leave\n", True, "STATE_PENDING", "goes on"),
        ("", True, "STATE_PENDING", "goes on"),  # the end of the input
        (None, False, "STATE_PENDING", "millrace train cancel mine ends it"),
    ],
)
def test_an_interrupted_watch_asks_whether_to_cancel_the_job(
    store: ObjectStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str | None,
    person: bool,
    state: str,
    text: str,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(code, "watch_job", interrupted)
    monkeypatch.setattr(code, "can_ask", lambda: person)
    result = commanded(store, "train", "run", f"{folder}:train:loop", "--job", "mine", "--watch", answer=answer)
    assert result.exit_code == 130, result.output
    assert text in " ".join(result.output.split())
    (job,) = json.loads(commanded(store, "train", "list", "--json").stdout)["training_jobs"]
    assert job["state"] == state


def test_a_model_of_ones_own_is_pushed_and_swept(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_this_process(monkeypatch)
    commit_table(store)
    folder = write_files(tmp_path / "net", {"net.py": NET})
    rows = ("--dataset-version", VERSION, "--input-column", "x", "--batch-size", "70", "--epochs", "2")

    model = ("--model", f"{folder}:net:build", "--model-arg", "dropout=0.5")
    result = commanded(store, "train", "sweep", "s", *rows, *model, "--grid", "model.kwargs.width=4", "--json")

    assert result.exit_code == 0, result.output
    base = json.loads(result.stdout)["spec"]["base"]
    assert base["model"]["code_bundle"] == pushed(store, folder)
    assert (base["model"]["entry"], base["model"]["kwargs"]) == ("net:build", {"dropout": 0.5})
    assert (base["model"]["in_channels"], base["model"]["num_classes"]) == (6, 3)
    assert "builder" not in base["model"]


@pytest.mark.parametrize("command", [("create",), ("sweep", "--grid", "epochs=1")])
def test_a_model_whose_folder_is_not_there_is_wrong_usage(store: ObjectStore, command: tuple[str, ...]) -> None:
    name, *options = command
    arguments = ("--dataset-version", VERSION, "--model", "./no-such-folder:net:build")

    result = commanded(store, "train", name, "j", *arguments, *options)

    assert result.exit_code == 2
    assert "'./no-such-folder' does not exist" in " ".join(result.output.split())
    assert list(store.list()) == []


def test_a_model_of_ones_own_in_python() -> None:
    model = mc.own_model("codeBundles/x", "net:build", config={"width": 8})
    spec = mc.training_spec("datasets/d/versions/v", model=model, epochs=1, global_batch_size=8)

    assert (spec.model.entry, spec.model.code_bundle, spec.model.builder) == ("net:build", "codeBundles/x", "")
    assert dict(spec.model.kwargs) == {"width": 8}


def test_run_of_one_file_names_its_job(store: ObjectStore, folder: Path) -> None:
    result = commanded(store, "train", "run", f"{folder / 'train.py'}:train:loop", "--job", "mine", "--json")
    assert json.loads(result.stdout)["name"] == "trainingJobs/mine"


def test_run_of_a_script_pushes_the_file_alone_or_the_folder_that_is_named(store: ObjectStore, folder: Path) -> None:
    script = write_files(folder, {"jobs/cells.py": "import json\n"}) / "jobs" / "cells.py"
    outcome = commanded(store, "train", "run", str(script), "--no-watch", "--json")
    assert outcome.exit_code == 0, outcome.output
    alone = json.loads(outcome.stdout)
    outcome = commanded(
        store, "train", "run", f"{folder}:jobs/cells.py", "--gpus-per-worker", "0", "--no-watch", "--json"
    )
    whole = json.loads(outcome.stdout)
    assert re.fullmatch("trainingJobs/cells-[0-9a-f]{8}", alone["name"])
    assert alone["spec"]["program"]["entry"] == "cells.py"
    assert whole["spec"]["program"]["entry"] == "jobs/cells.py"
    assert whole["spec"]["program"]["code_bundle"] == pushed(store, folder)
    assert alone["spec"]["program"]["code_bundle"] == pushed(store, script)


def test_run_of_a_script_alone_is_refused_where_it_imports_what_lies_beside_it(
    store: ObjectStore, folder: Path
) -> None:
    script = write_files(folder, {"cells.py": "def f():\n    from train import loop\n"}) / "cells.py"
    result = commanded(store, "train", "run", str(script))
    assert result.exit_code == 2
    outcome = re.sub(r"[\s│]+", "", result.output)
    assert f"importstrainbesideit,andonlythefilewouldbepushed;pushitsfolder:{folder}:cells.py" in outcome
    assert list(store.list()) == []


@pytest.mark.parametrize(
    "entry",
    [
        "./no-such.py",
        "{folder}:no.py",
        "{folder}/train.py:train.py",
        "train:loop",
        "./no-such-folder:train:loop",
        "{folder}:train",
        ":train:loop",
    ],
)
def test_an_entry_of_another_form_is_wrong_usage(store: ObjectStore, folder: Path, entry: str) -> None:
    result = commanded(store, "train", "run", entry.format(folder=folder))
    assert result.exit_code == 2
    assert list(store.list()) == []


def test_an_entry_that_is_not_there_is_refused(store: ObjectStore, folder: Path) -> None:
    result = commanded(store, "train", "run", f"{folder}:train:other")
    assert result.exit_code == 4
    assert "train.py has no function 'other'; it has loop" in " ".join(result.output.split())


def test_a_specification_of_a_program_keeps_whole_numbers_and_refuses_what_json_cannot_hold() -> None:
    bundle = code_bundle_pb2.CodeBundle(name="codeBundles/x")
    spec = mc.program_spec(bundle, "train:loop", config={"n": 3, "x": 0.5}, dataset_version="datasets/d/versions/v")
    assert spec.program.config_json == '{"n": 3, "x": 0.5}'
    assert (spec.program.code_bundle, spec.dataset_version) == ("codeBundles/x", "datasets/d/versions/v")
    with pytest.raises(ValueError, match="JSON compliant"):
        mc.program_spec(bundle, "train:loop", config={"x": float("nan")})
