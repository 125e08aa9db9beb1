"""What the status tells of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ecoserve_operator import views
from ecoserve_operator.cluster_api import Json
from ecoserve_operator.plan import View
from ecoserve_operator.status import cluster_status

from tests.operator.plan_world import World, desired

URL = "http://c.one.svc/v1"


def settled(**fields: object) -> World:
    world = World(desired(2, **fields))
    world.settle()
    return world


def told(world: World, old: Json, generation: int, gateway: str = "") -> dict[str, Json]:
    view = View(world.wanted, world.observe())
    status = cluster_status(view, None, [], old, generation, URL, gateway)
    return {c["type"]: c for c in status["conditions"]}


def test_a_condition_of_the_autoscaler_speaks_of_what_it_has_looked_at() -> None:
    world = settled(autoscaled=True)
    measured = {
        "type": "Autoscaling",
        "status": "True",
        "reason": "WithinBounds",
        "message": "nothing to do",
        "lastTransitionTime": views.stamp(world.now),
        "observedGeneration": 3,
    }
    conditions = told(world, {"conditions": [measured]}, 4)
    assert conditions["Autoscaling"] == measured
    assert conditions["Ready"]["observedGeneration"] == 4
    world.wanted = replace(world.wanted, autoscaled=False)
    off = told(world, {"conditions": [measured]}, 5)["Autoscaling"]
    assert (off["reason"], off["observedGeneration"]) == ("Disabled", 5)
    world.wanted = replace(world.wanted, autoscaled=True)
    again = told(world, {"conditions": [off]}, 6)["Autoscaling"]
    assert (again["reason"], again["observedGeneration"]) == ("NotYetMeasured", 6)


def test_a_cluster_that_nobody_can_reach_is_not_available() -> None:
    world = settled()
    assert told(world, {}, 1)["Available"]["status"] == "True"
    available = told(world, {}, 1, "it has no Pod")["Available"]
    assert (available["status"], available["reason"]) == ("False", "GatewayUnavailable")
    assert available["message"] == "gateway: it has no Pod"


@pytest.mark.parametrize(
    ("conditions", "why"),
    [
        ([], ""),
        ([{"type": "Available", "status": "True", "message": "it is"}], ""),
        ([{"type": "Progressing", "status": "False", "message": "it is late"}], ""),
        ([{"type": "Available", "status": "False", "message": "too few Pods"}], "too few Pods"),
    ],
)
def test_why_a_deployment_serves_nobody(conditions: list[Json], why: str) -> None:
    assert views.unavailable({"status": {"conditions": conditions}}) == why
    assert views.unavailable(None) == ""
