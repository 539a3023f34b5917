"""Weights of a model of the caller's own code become a checkpoint, to serve and to fine-tune from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millrace_client as mc
from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedModel
from millrace_client import errors
from shared.checkpoint import load_checkpoint, resolve
from shared.code_bundle_registry import CodeBundles, load_code
from shared.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from shared.model_spec import ModelSpec
from shared.models.loaded import LoadedModel
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.code_folders import store_bundle, write_files
from tests.support.own_models import NET, code_of_this_process, spec_of
from tests.support.train_server import commanded, with_client
from tests.support.wheels import OFFLINE, write_wheel
from tests.unit.train_service.learners import CLASSES, WIDTH, commit_table
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.worker.test_loop import entries, events, new_job, run_of
from train_service.domain.spec import OwnModelFacts, settled
from train_service.jobs import checkpoint_import, entry_child
from train_service.jobs.checkpoint_import import CheckpointImportRequest, CheckpointImports, SentFile
from train_service.jobs.deletion import Deletions
from train_service.jobs.own_code import ProgramCheck
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import EventKind

MODEL = "trainingJobs/imp/checkpoints/imported"
ARGUMENTS = {"width": 5, "dropout": 0.3}


@pytest.fixture
def bundle(store: ObjectStore) -> str:
    return store_bundle(store, {"net.py": NET}).name


def source() -> torch.nn.Module:
    """The model as its user has it, with learnt statistics."""
    torch.manual_seed(5)
    names: dict[str, Any] = {}
    exec(NET, names)
    model: torch.nn.Module = names["Net"](**ARGUMENTS)
    with torch.no_grad():
        model(torch.randn(64, WIDTH))
    return model.eval()


@contextmanager
def loaded(store: ObjectStore, bundle: str) -> Iterator[None]:
    """Meanwhile this process has the bundle's code, as a replica and a worker have it."""
    with code_of_this_process():
        load_code(store, bundle)
        yield


def spec_for(bundle: str, **fields: Any) -> Any:
    model = mc.own_model(bundle, "net:Net", config=ARGUMENTS)
    return mc.import_spec(model=model, input_shape=[WIDTH], input_column="x", **fields)


def imported(store: ObjectStore, path: Path, spec: Any) -> Any:
    return with_client(store, lambda train: train.import_checkpoint("imp", path, spec))


def test_an_own_models_state_dict_answers_with_the_logits_of_its_source_and_is_served_and_fine_tuned(
    store: ObjectStore, bundle: str, tmp_path: Path
) -> None:
    model = source()
    torch.save({"state_dict": {f"module.{name}": one for name, one in model.state_dict().items()}}, tmp_path / "a.pt")
    made = imported(store, tmp_path / "a.pt", spec_for(bundle, names=mc.name_map(prefixes={"module.": ""})))
    assert (made.report.fits, made.report.key, made.report.fitted_count) == (True, "state_dict", 9)
    assert made.training_job.spec.model.code_bundle == bundle
    assert (made.training_job.spec.model.in_channels, made.training_job.spec.model.num_classes) == (WIDTH, CLASSES)
    with pytest.raises(FailedPrecondition, match="trainingJobs/imp"):
        CodeBundles(store).delete(bundle)

    entry = resolve(store, "name", MODEL)
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    rows = np.random.default_rng(2).standard_normal((9, WIDTH)).astype(np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(rows)).numpy()
    with loaded(store, bundle):
        logits = LoadedModel(checkpoint)(rows)[0]
        assert logits.tobytes() == expected.tobytes()
        served = ServedModel(checkpoint)
        assert [one.name for one in served.signature.raw] == ["x"]
        assert served.forward(Rows(RAW, {"x": rows})).arrays[0].tobytes() == expected.tobytes()

    commit_table(store)
    base = replace(TABLE, initial_checkpoint=MODEL, checkpoint_every_steps=1)
    tuned = settled(spec_of(bundle, base, "net:Net", kwargs=ARGUMENTS), OwnModelFacts(num_classes=CLASSES), (WIDTH,))
    new_job(store, "trainingJobs/tuned", tuned)
    with loaded(store, bundle):
        run_of(store, "trainingJobs/tuned", spec=tuned).run()
    assert not events(store, "trainingJobs/tuned", EventKind.WARNING), "all tensors were taken"
    last = entries(store, "trainingJobs/tuned")[tuned.epochs]
    content = load_checkpoint(store, last.folder, last.manifest_sha256).content
    assert (content.initial_checkpoint, content.initial_checkpoint_sha256) == (MODEL, entry.manifest_sha256)


@pytest.fixture
def whole_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the guarded process changes of itself is as before."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    threads = torch.get_num_threads()
    with code_of_this_process():
        sys.modules.pop("net", None)
        yield
        sys.modules.pop("net", None)
    torch.set_num_threads(threads)


def ask(folder: Path, files: Path, net: str = NET, function: str = "Net") -> dict[str, Any]:
    """What the guarded process would answer, in this one."""
    code = write_files(folder / "code", {"net.py": net})
    model = ModelSpec(
        builder="",
        in_channels=WIDTH,
        num_classes=CLASSES,
        kwargs=ARGUMENTS,
        code_bundle="codeBundles/x",
        entry=f"net:{function}",
    )
    weights = {
        "files": str(files),
        "names": {"key": "", "renames": [], "drop": [], "allow_missing": []},
        "model": model.as_config(),
        "allow_non_finite": False,
        "report": str(folder / "report.json"),
        "output": str(folder / "output"),
        "folder": str(code),
    }
    question = {"weights": weights, "folder": str(code), "module": "net", "function": function, "path": list(sys.path)}
    return entry_child._answer(question)


@pytest.mark.usefixtures("whole_process")
def test_the_weights_of_another_width_are_reported_tensor_by_tensor(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, CLASSES))
    named = {"0": "body.0", "1": "body.1", "2": "body.4"}
    state = {f"{named[name[0]]}{name[1:]}": one for name, one in layers.state_dict().items()}
    torch.save(state, files / "a.pt")
    assert ask(tmp_path, files) == {"problem": ""}
    report = (tmp_path / "report.json").read_text()
    assert '"misfits_count": 7' in report
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("net", "function", "expected"),
    [
        ("import nothing_such\n", "Net", "net.py:1: ModuleNotFoundError"),
        (NET, "Other", "has no function 'Other'"),
        (NET + "\n\nclass Raises(Net):\n    def __init__(self, **_):\n        1 / 0\n", "Raises", "ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("whole_process")
def test_code_that_makes_no_model_is_reported_with_its_line(
    tmp_path: Path, net: str, function: str, expected: str
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    torch.save({"a": torch.zeros(1)}, files / "a.pt")
    answer = ask(tmp_path, files, net, function)
    assert expected in answer["problem"], answer


def test_a_service_that_runs_no_code_of_its_callers_refuses_it(store: ObjectStore, tmp_path: Path) -> None:
    torch.save(source().state_dict(), tmp_path / "a.pt")
    folder = write_files(tmp_path / "net", {"net.py": NET})
    command = ("train", "import", "imp", str(tmp_path / "a.pt"), "--model", f"{folder}:net:Net", "--input-shape", "6")
    refused = commanded(store, *command, own_code=False)
    assert refused.exit_code != 0
    assert "MILLRACE_OWN_CODE" in refused.output
    wrong = commanded(store, "train", "import", "imp", str(tmp_path / "a.pt"), "--model", "mlp", "--input-shape", "6")
    assert wrong.exit_code == 2
    assert "--in-channels" in wrong.output


def test_weights_are_read_with_the_packages_that_the_models_bundle_requires(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"MILLRACE_CODE_ENVIRONMENTS": "uv", "MILLRACE_CODE_ENVIRONMENTS_FOLDER": str(tmp_path / "made")}
    for name, value in {**made, **OFFLINE, "UV_FIND_LINKS": str(tmp_path / "wheels")}.items():
        monkeypatch.setenv(name, value)
    line = write_wheel(tmp_path / "wheels", "only_weights", "2", {"only_weights.py": ""})
    bundle = store_bundle(store, {"net.py": f"import only_weights\n{NET}", "requirements.lock": f"{line}\n"}).name
    torch.save(source().state_dict(), tmp_path / "a.pt")
    assert imported(store, tmp_path / "a.pt", spec_for(bundle)).report.fits


def test_a_service_that_runs_no_code_refuses_the_import_of_a_model_whose_bundle_it_has(
    store: ObjectStore, bundle: str, tmp_path: Path
) -> None:
    torch.save(source().state_dict(), tmp_path / "a.pt")
    with pytest.raises(errors.FailedPrecondition, match="MILLRACE_OWN_CODE") as refused:
        with_client(
            store, lambda train: train.import_checkpoint("imp", tmp_path / "a.pt", spec_for(bundle)), own_code=False
        )
    assert refused.value.reason == "OWN_CODE_OFF"
    assert not [info.key for info in store.list("trainingJobs")]


# Its code runs in the child and takes the place of what writes the weights.
FORGED = """
from train_service.jobs import weights_child

weights_child._write = lambda path, *_: path.write_bytes(b"no weights")
"""


def test_weights_that_a_models_code_wrote_itself_become_no_checkpoint(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, {"net.py": NET + FORGED}).name
    torch.save(source().state_dict(), tmp_path / "a.pt")
    with pytest.raises(errors.InvalidArgument, match=r"spec\.model\.entry: .*leave that to the check"):
        imported(store, tmp_path / "a.pt", spec_for(bundle))
    assert not [info.key for info in store.list("trainingJobs")]


def test_the_child_of_an_import_for_an_own_model_holds_a_place(
    store: ObjectStore, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))
    taken: list[str] = []

    def ask(*_: Any) -> dict[str, str]:
        with pytest.raises(ResourceExhausted) as refused, jobs.own_models.import_place(0):
            pass
        taken.append(refused.value.message)
        return {"problem": "nothing is read here"}

    monkeypatch.setattr(checkpoint_import, "ask_in_child", ask)
    request = CheckpointImportRequest(
        job_id="imp",
        spec=spec_of(bundle, TABLE, "net:Net", kwargs=ARGUMENTS),
        input_column=None,
        class_names=(),
        names={},
        files=[SentFile("a.pt", 1, "")],
        request_id="",
        digest="",
        validate_only=False,
    )
    with pytest.raises(InvalidArgument, match="nothing is read here"):
        CheckpointImports(store, jobs, Deletions(store))._read(request, tmp_path)
    assert taken == ["1 other import for a model of a code bundle is being read; try again later"]
    with jobs.own_models.import_place(0):
        pass
