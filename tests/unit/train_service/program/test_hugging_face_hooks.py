"""What a program's Hugging Face hooks do on each rank; the Trainer itself is in the integration tests."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.errors import FailedPrecondition
from tests.unit.train_service.in_ranks import in_ranks
from train_service.learning.ranks import Ranks
from train_service.program.worker import end_saves_together, own_output_dir, paths_to_report


@pytest.mark.parametrize("given", ["/tmp/hf-output", "/var/tmp/a/b", "/dev/shm/hf"])
def test_a_scratch_folder_is_one_of_the_attempts_own(given: str, tmp_path: Path) -> None:
    assert own_output_dir(given, tmp_path / "outputs") == f"{tmp_path}/outputs{given}"


def test_a_relative_folder_is_one_of_the_attempts_own(tmp_path: Path) -> None:
    assert own_output_dir("results/../out", tmp_path / "outputs") == f"{tmp_path}/outputs{Path.cwd()}/out"


def test_a_folder_of_the_users_own_or_of_the_attempt_stays(tmp_path: Path) -> None:
    for given in ("/mnt/results", f"{tmp_path}/r0/tmp/made", f"{tmp_path}/outputs/tmp/hf-output"):
        assert own_output_dir(given, tmp_path / "outputs") == given


def report(ranks: Ranks, folder: Path) -> list[str]:
    """What rank r reports that has the files `shared` and `r{r}`, and rank 0 one below a folder too."""
    own = folder / f"node-{ranks.rank}"
    own.mkdir()
    for name in ("shared", f"r{ranks.rank}"):
        (own / name).touch()
    if ranks.rank == 0:
        (own / "sharded").mkdir()
        (own / "sharded" / "part").touch()
    return paths_to_report(own)


def test_a_rank_reports_the_files_that_no_lower_rank_has(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    assert in_ranks(3, report, tmp_path, tmp_path / "nodes") == [["r0", "sharded/part", "shared"], ["r1"], ["r2"]]


def test_nothing_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=f"saved nothing to {tmp_path}/checkpoint-4") as refused:
        paths_to_report(tmp_path / "checkpoint-4")
    assert refused.value.specific_reason == "CHECKPOINT_NOT_FOUND"


class SlowSaver:
    """Saves as `transformers.Trainer` does: each rank its own file, and rank 1 takes long."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.args = SimpleNamespace(world_size=ranks.world_size)
        self._rank = ranks.rank
        self._folder = folder

    def _save_checkpoint(self) -> None:
        if self._rank == 1:
            time.sleep(0.3)
        (self._folder / f"rng_state_{self._rank}.pth").touch()


def save(ranks: Ranks, folder: Path) -> list[str]:
    end_saves_together(SlowSaver)
    SlowSaver(ranks, folder)._save_checkpoint()
    return sorted(one.name for one in folder.iterdir())


def test_a_save_ends_once_it_has_ended_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    both = ["rng_state_0.pth", "rng_state_1.pth"]
    assert in_ranks(2, save, tmp_path, tmp_path / "checkpoint-2") == [both, both]
