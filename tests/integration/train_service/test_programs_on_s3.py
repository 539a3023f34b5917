"""A user's own training function on an S3 store: its ranks hold none of the store's keys, and report in all ways.

`test_program_shards.py` has the whole loop there, with a kill and what goes on behind it.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from shared.checkpoint.format import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.s3_server import SECRET_KEY
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(900)

MODES = """
import shutil
import tempfile
from pathlib import Path

import ray.train
from ray.train import Checkpoint
from ray.train.v2.api.report_config import CheckpointUploadMode as Mode


def saved(folder, text):
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "model.pt").write_text(text)
    return Checkpoint.from_directory(str(folder))


def loop(config):
    rank = ray.train.get_context().get_world_rank()
    spool = Path(ray.train.get_context().get_storage().experiment_fs_path)

    def upload(checkpoint, name):
        shutil.copytree(checkpoint.path, spool / name)
        Path(spool / name, "model.pt").write_text(Path(checkpoint.path, "model.pt").read_text() + " by a function")
        return Checkpoint.from_directory(str(spool / name))

    for mode in (Mode.SYNC, Mode.ASYNC, Mode.NO_UPLOAD):
        if rank:
            ray.train.report({"n": 1}, checkpoint_upload_mode=mode)
        elif mode is Mode.NO_UPLOAD:
            mine = spool / "mine"
            ray.train.report({"n": 1}, saved(mine, mode.value), checkpoint_upload_mode=mode)
            shutil.rmtree(mine)
        else:
            with tempfile.TemporaryDirectory() as folder:
                ray.train.report({"n": 1}, saved(folder, mode.value), checkpoint_upload_mode=mode)
    with tempfile.TemporaryDirectory() as folder:
        how = {} if rank else {"checkpoint": saved(folder, "uploaded"), "checkpoint_upload_fn": upload}
        ray.train.report({"n": 2}, **how)
    read = Path(ray.train.get_checkpoint().path, "model.pt").read_text()
    ray.train.report({"read": float(read == "uploaded by a function")})
    if rank == 0:
        elsewhere = saved(tempfile.mkdtemp(), "x")
        try:
            ray.train.report({"n": 3}, elsewhere, checkpoint_upload_mode=Mode.NO_UPLOAD)
        except Exception as error:
            print("refused:", error)
"""
HOSTILE = (Path(__file__).parents[2] / "support" / "hostile_program.py").read_text()


def test_code_that_looks_for_the_stores_keys_finds_none_and_reaches_no_other_job(
    s3_stack: TrainStack, tmp_path: Path
) -> None:
    stack, half = s3_stack, len(SECRET_KEY) // 2
    name = f"j{uuid.uuid4().hex[:12]}"
    stack.store.put("trainingJobs/other/checkpoints/data/model.pt", b"another's")
    stack.store.put(f"trainingJobs/{name}/checkpoints/data/foreign/r0000/x", b"of the job's own checkpoints")
    job = f"trainingJobs/{name}"
    config = {
        "wanted": {"secret": [SECRET_KEY[:half], SECRET_KEY[half:]], "planted": ["a text that is", " surely there"]},
        "job": name,
        "to_read": [
            "trainingJobs/other/checkpoints/data/model.pt",
            f"{job}/checkpoints/data/../../../other/checkpoints/data/model.pt",
            f"{job}/checkpoints/log/00000000000000000001.json",
            "datasets/digits/versions/v1/log/00000000000000000001.json",
            f"{job}/checkpoints/data/foreign/r0000/x",
        ],
        "to_write": [
            "trainingJobs/other/checkpoints/data/model.pt",
            f"{job}/checkpoints/log/00000000000000000009.json",
            f"{job}/checkpoints/data/report-00000001-a00001-00000000/r0000/model.pt",
            f"{job}/logs/a00001/r0001/00000000.txt",
            f"{job}/logs/a00001/r0000/../r0001/00000000.txt",
            f"{job}/events/log/00000000000000000009.json",
        ],
    }
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": HOSTILE}))
        spec = mc.program_spec(bundle, "train:loop", config=config, num_workers=1, max_failures=0)
        millrace.train.create_training_job(name, spec)
    ended = stack.client.finished(job)
    assert ended.state == State.STATE_SUCCEEDED, ended
    (entry,) = CheckpointRegistry(stack.store, job).entries()
    said = json.loads(stack.store.get(f"{entry.folder}/r0000/found.json"))

    assert said["found"] == {"environ": [], "cmdline": [], "memory": ["planted"], "objects": []}
    tried = said["tried"]
    assert tried.pop(f"read {job}/checkpoints/data/foreign/r0000/x") == ""
    assert tried.pop("forged address") == "HTTP 403"
    assert len(tried) == 10
    for what, refusal in tried.items():
        assert "rank 0 may not" in refusal or "rank 0 names the object" in refusal, (what, refusal)
    assert stack.store.get("trainingJobs/other/checkpoints/data/model.pt") == b"another's"
    assert not stack.store.exists(f"{job}/logs/a00001/r0001/00000000.txt")


@pytest.mark.long
def test_every_way_to_upload_commits_what_was_reported_on_real_workers(s3_stack: TrainStack, tmp_path: Path) -> None:
    stack = s3_stack
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": MODES}))
        spec = mc.program_spec(bundle, "train:loop", num_workers=2, max_failures=0)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        ended = stack.client.finished(job.name)
        metrics = [point.values for point in millrace.train.list_metrics(job.name)]
    entries = CheckpointRegistry(stack.store, job.name).entries()
    assert [one.step for one in entries] == [1, 2, 3, 4]
    for entry, text in zip(entries, ("SYNC", "ASYNC", "NO_UPLOAD", "uploaded by a function"), strict=True):
        assert verify_program_checkpoint(stack.store, entry.folder, entry.manifest_sha256).files
        assert stack.store.get(f"{entry.folder}/r0000/model.pt").decode() == text
    assert metrics[4]["read"] == 1.0
    assert ended.state == State.STATE_SUCCEEDED, ended
    # A folder elsewhere may be removed at any time.
    said = stack.store.get(f"{job.name}/logs/a00001/r0000/00000000.txt").decode()
    assert "refused: the checkpoint is outside of the run's folder" in said
