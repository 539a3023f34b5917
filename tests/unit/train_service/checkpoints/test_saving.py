"""A checkpoint as its ranks take it together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shared.dataset_version import load_version
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import SPEC, STEPS, VERSION, commit_table, trained
from train_service.checkpoints.saving import Checkpointing, Lineage
from train_service.domain.spec import FSDP, Placement
from train_service.learning.ranks import Ranks
from train_service.loading.preprocessing import Preprocessing


def test_while_shards_are_gathered_every_rank_reports_progress_with_each_tensor(tmp_path: Path) -> None:
    """All of it comes before the first byte is copied, and may take longer than a rank may stand still."""
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    commit_table(open_store(settings))
    (tmp_path / "ranks").mkdir()

    first, second = in_ranks(2, signs_of_life_of_a_checkpoint, tmp_path / "ranks", settings)
    for touched, parameters in (first, second):
        # Each has its weights, and of Adam's two moments and the number of its steps.
        assert touched >= 4 * parameters > 0


def signs_of_life_of_a_checkpoint(ranks: Ranks, settings: StoreSettings) -> tuple[int, int]:
    """How often this rank said that it gets on, and of how many parameters. Nothing is written."""
    store = open_store(settings)
    version, spec = load_version(store, VERSION), replace(SPEC, placement=Placement(parallel=FSDP))
    lineage = Lineage(
        job_name="trainingJobs/sharded",
        attempt=1,
        spec=spec,
        version=version,
        preprocessing=Preprocessing(spec, version.columns),
        steps_per_epoch=STEPS // 2,
        total_steps=STEPS,
    )
    signs: list[int] = []
    learner = trained(spec, range(1), ranks)
    with Checkpointing(store, lineage, ranks, learner, None, lambda: signs.append(1)) as checkpointing:
        checkpointing.take(1, {}, [], None, final=False)
    return len(signs), len(list(learner.model.parameters()))
