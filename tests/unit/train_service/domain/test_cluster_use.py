"""Who holds what of a cluster, from what Ray tells of actors, placement groups and nodes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from shared.storage import ObjectStore
from train_service.domain.capacity import ClusterUse, Holder, RayActor, RayGroup, kind_of, use_of
from train_service.jobs.training_jobs import USE_KEY, USE_REFRESHED_S, ClusterMemory

TRAIN, IMPORT = f"train-{'a' * 32}", f"import-{'b' * 32}"


def actor(actor_id: str, name: str = "", *, owner: str = "driver", group: str = "", cpus: float = 0.0) -> RayActor:
    return RayActor(
        actor_id=actor_id, name=name, process=f"p-{actor_id}", owner=owner, group=group, resources={"CPU": cpus}
    )


def test_uses_of_attempts_deployments_tasks_and_others_add_up_with_the_free_capacity() -> None:
    actors = [
        actor("1", TRAIN),
        # Its workers are in its placement group, whose resources count once.
        actor("2", owner="p-1", group="g", cpus=1.0),
        actor("3", IMPORT),
        actor("4", owner="p-3"),
        actor("5", owner="p-4", cpus=2.0),
        actor("6", "SERVE_REPLICA::uid-1-v2#model#x1", cpus=1.0),
        actor("7", "SERVE_REPLICA::uid-1-v3#model#x2", cpus=1.0),
        actor("8", "somebody's", cpus=0.5),
    ]
    groups = [
        RayGroup(creator="1", resources={"CPU": 3.0, "GPU": 2.0}),
        RayGroup(creator="gone", resources={"CPU": 1.0}),
    ]

    use = use_of([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0}], [{"CPU": 0.5}, {"CPU": 1.0}], actors, groups)

    assert {(one.attempt, one.deployment_uid, one.what): (one.cpus, one.gpus) for one in use.holders} == {
        (TRAIN, "", ""): (3.0, 2.0),
        (IMPORT, "", ""): (2.0, 0.0),
        ("", "uid-1", ""): (2.0, 0.0),
        ("", "", "other actors"): (0.5, 0.0),
        ("", "", "others, in placement groups"): (1.0, 0.0),
        ("", "", "tasks, which read, prepare or transform rows"): (2.0, 0.0),
    }
    assert (use.nodes, use.cpus, use.gpus, use.free_cpus, use.free_gpus) == (2, 12.0, 2.0, 1.5, 0.0)
    assert sum(one.cpus for one in use.holders) + use.free_cpus == use.cpus
    assert sum(one.gpus for one in use.holders) + use.free_gpus == use.gpus
    assert (kind_of(TRAIN), kind_of(IMPORT), kind_of("somebody's")) == ("train", "import", "")


def test_cluster_use_is_written_when_it_changes_and_at_intervals(store: ObjectStore) -> None:
    now = [1000.0]
    memory = ClusterMemory(store, lambda: now[0])
    assert memory.use() == (ClusterUse(), 0.0)
    use = ClusterUse(nodes=1, cpus=2.0, free_cpus=1.0, holders=[Holder(attempt=TRAIN, cpus=1.0)])

    memory.note_use(use)
    now[0] += 5
    memory.note_use(use)
    assert memory.use() == (use, 1000.0)
    changed = replace(use, free_cpus=2.0, holders=[])
    memory.note_use(changed)
    assert memory.use() == (changed, 1005.0)
    now[0] += USE_REFRESHED_S
    memory.note_use(changed)
    assert memory.use() == (changed, 1005.0 + USE_REFRESHED_S)

    later = {"time": 1.0, **asdict(use), "colour": "red"}
    store.put(USE_KEY, json.dumps(later).encode())
    assert memory.use() == (use, 1.0)
