"""The autoscaler against a real API server and a real Prometheus whose history is written."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ecoserve_operator.cluster_api import CLUSTERS, EVENTS, ApiError, Json, Kind

from tests.operator.control_world import Mortal, until
from tests.operator.kube_api import ApiServer
from tests.operator.operated import Operator, operator
from tests.scaling.prometheus_server import History, prometheus
from tests.scaling.recorded import Load, level

LOADS = {
    "late": Load(count=2, violated=4.0),
    "dry": Load(count=2, violated=4.0),
    "off": Load(count=2, violated=4.0),
    "low": Load(count=4, use=level(0.1)),
    "nan": Load(count=4, use=level(math.nan)),
    "gone": Load(count=4, use=level(0.1), change={"ecoserve_sheds_total": level(None)}),
}


class Jostled(Mortal):
    """Somebody else is always faster to write the status of a cluster that was just scaled."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.lost: set[str] = set()

    async def apply(self, kind: Kind, body: Json, subresource: str = "") -> Json:
        name, status = body["metadata"]["name"], body.get("status", {})
        if kind == CLUSTERS and status.get("scaling") and name not in self.lost:
            self.lost.add(name)
            raise ApiError(409, "Conflict", "the object has been modified")
        return await super().apply(kind, body, subresource)


@pytest.fixture
async def world(
    kube: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Operator]:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    async with operator(namespace, connection=Jostled) as found:
        yield found


async def create(world: Operator, name: str, url: str, **given: object) -> Operator:
    """A cluster as large as its load says, that is scaled."""
    one = replace(world, cluster_name=name)
    autoscaling = {"enabled": True, "prometheus": url, "interval": "5s"} | given
    await one.create(replicas=LOADS[name].count, maxReplicas=8, autoscaling=autoscaling)
    return one


async def reason(one: Operator, wanted: str, words: str = "") -> Json:
    """Waits until the autoscaler's condition has that reason, with those words in its message."""

    async def so() -> Json | None:
        condition = await one.condition("Autoscaling")
        found = condition.get("reason") == wanted and words in condition["message"]
        return condition if found else None

    found: Json = await until(so, f"{one.cluster_name}: Autoscaling is not {wanted}")
    return found


async def status(one: Operator) -> Json:
    found: Json = (await one.cluster())["status"]
    return found


async def replicas(one: Operator) -> int:
    return int((await one.cluster())["spec"]["replicas"])


async def runs(one: Operator, count: int) -> None:
    """Waits until the cluster is to have so many instances, and has them."""

    async def so() -> bool:
        item = await one.cluster()
        found = (item["spec"]["replicas"], item.get("status", {}).get("readyReplicas"))
        return found == (count, count)

    await until(so, f"{one.cluster_name} has not {count} instances")


async def told(one: Operator, reason: str) -> str:
    """The message of its event of that reason; events are written apart from what they tell of."""

    async def so() -> str | None:
        events = (await one.api.list_all(EVENTS, one.namespace))[0]
        mine = [e for e in events if e["involvedObject"]["name"] == one.cluster_name]
        return {event["reason"]: event["message"] for event in mine}.get(reason)

    return str(await until(so, f"{one.cluster_name}: no event {reason}"))


async def test_it_scales_by_what_prometheus_says_and_never_without(
    world: Operator, tmp_path: Path
) -> None:
    history = History()
    for name, load in LOADS.items():
        load.write(history, f"{world.namespace}/{name}")
    history.write(tmp_path)
    with prometheus(tmp_path) as url:
        late = await create(world, "late", url)
        dry = await create(world, "dry", url, dryRun=True)
        off = await create(world, "off", url, enabled=False)
        low = await create(world, "low", url)
        nan = await create(world, "nan", url)
        gone = await create(world, "gone", url)

        # 40 % of two instances' requests are late: one more, and no other within the cooldown.
        await runs(late, 3)
        condition = await reason(late, "Cooldown")
        assert condition["status"] == "True"
        assert condition["message"] == (
            "SLO violations stayed above 5 % for 1 min; the last step up was less than 3 min ago"
        )
        (step,) = (await status(late))["scaling"]
        assert (step["before"], step["after"]) == (2, 3)
        assert step["reason"].startswith("SLO violations stayed above 5 % for 1 min (40 % at")
        assert "from 2 to 3 instances: SLO violations" in await told(late, "Expanded")

        await runs(low, 3)
        await reason(low, "Cooldown")
        assert await told(low, "Contracted") == (
            "from 4 to 3 instances: use stayed below 40 % for 10 min (10 % at most)"
        )

        condition = await reason(dry, "Cooldown")
        (step,) = (await status(dry))["scaling"]
        assert step["dryRun"]
        assert (step["before"], step["after"]) == (2, 3)
        assert condition["message"].startswith("dry run: ")
        assert (await told(dry, "DryRun")).startswith("would go from 2 to 3 instances: ")

        for one, words in (
            (nan, "ecoserve_instance_use of i-0 is nan, which cannot be"),
            (gone, "SLO violations: no data"),
        ):
            condition = await reason(one, "SignalsUnknown")
            assert condition["status"] == "False"
            assert words in condition["message"]

        # A number set by hand stands, and starts a cooldown as a step does.
        await gone.scale(5)
        await runs(gone, 5)
        await reason(off, "Disabled")
        await dry.change(autoscaling={"dryRun": False})
        await runs(dry, 3)

    # Prometheus is gone.
    everyone = [late, dry, off, low, nan, gone]
    before = [await replicas(one) for one in everyone]
    assert before == [3, 3, 2, 3, 4, 5]
    for one in (late, dry, low, nan, gone):
        condition = await reason(one, "PrometheusUnavailable", "cannot be reached")
        assert condition["status"] == "False"
    assert [await replicas(one) for one in everyone] == before
    assert [len((await status(one)).get("scaling", ())) for one in everyone] == [1, 2, 0, 1, 0, 0]
    # The controller forgets nothing when it restarts: a history is in the status.
    await world.stop()
    await world.start()
    await reason(late, "PrometheusUnavailable")
    assert len((await status(late))["scaling"]) == 1


async def test_a_load_that_rises_and_falls(world: Operator, tmp_path: Path) -> None:
    """8 to 16 instances and back by recorded series, N_l 6, N_u 11: split, merged, none
    restarted."""
    urls = []
    for name, use in (("busy", 0.95), ("calm", 0.1)):
        folder = tmp_path / name
        folder.mkdir()
        history = History()
        Load(count=16, use=level(use)).write(history, f"{world.namespace}/demo")
        history.write(folder)
        urls.append(folder)
    scaling: Json = {"enabled": True, "interval": "5s", "expand": {"cooldown": "0s"}}
    scaling["expand"] |= {"startingFor": "0s"}
    scaling["contract"] = {"cooldown": "0s", "maxStep": 8}
    with prometheus(urls[0]) as url:
        await world.create(
            replicas=8,
            minReplicas=8,
            maxReplicas=16,
            macro={"lower": 6, "upper": 11, "mergeCooldown": "0s"},
            autoscaling=scaling | {"prometheus": url},
        )
        await world.settle(10, 6)
        grown = await world.uids()
        messages = [step["reason"] for step in (await status(world))["scaling"]]
        assert len(messages) == 2
        assert all("use stayed above 85 % for 5 min (95 % at least)" in m for m in messages)
        await reason(world, "AtMaximum")
        assert await told(world, "Split")
    await reason(world, "PrometheusUnavailable")
    with prometheus(urls[1]) as url:
        await world.change(autoscaling={"prometheus": url})
        await world.settle(8)
        assert "from 16 to 8 instances: use stayed below 40 %" in await told(world, "Contracted")
        assert await told(world, "Merged")
        await reason(world, "AtMinimum")
    left = await world.uids()
    assert left.items() <= grown.items(), "what is left was never restarted"
