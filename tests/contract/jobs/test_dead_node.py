"""A node that died a moment ago, and that Ray takes for alive for another 15 seconds, gets no attempt and no worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ray_head import ray_head, ray_node

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ACTORS = 8
# Ray chooses a node anew for each actor, so that a third of them would stand on the dead one.
STARTS_ACTORS = """
import sys
import ray
from ray.util import placement_group
from shared.jobs.actor import NAMESPACE, find_actor, node_of, start_actor, worker_labels

ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False)
print("joined", flush=True)
sys.stdin.readline()
alive = {node["Labels"].get("name"): node["NodeID"] for node in ray.nodes() if node["Alive"]}
assert "dead" in alive, "Ray has noticed"
actors = [start_actor(f"toy-{number}") for number in range(int(sys.argv[2]))]
group = placement_group([{"CPU": 1}], bundle_label_selector=[worker_labels()])
for actor in actors:
    ray.get(actor.hold.remote())
    assert node_of(actor) != alive["dead"]
ray.get(group.ready())
print("all start", flush=True)
"""


def test_no_attempt_is_lost_on_a_node_that_died_a_moment_ago() -> None:
    with ray_head(num_cpus=1, dashboard=False) as head, ray_node(head, "dead") as node:
        command = [sys.executable, "-c", STARTS_ACTORS, head.address, str(ACTORS)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as starting:
            assert starting.stdin is not None
            assert starting.stdout is not None
            said = next((line for line in starting.stdout if line == "joined\n"), "")
            assert said, "the driver did not join"
            node.kill()
            rest, _ = starting.communicate("\n", timeout=600)
    assert "all start" in rest.splitlines(), rest
