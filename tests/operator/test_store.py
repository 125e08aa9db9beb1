"""What the controller knows: lists, watches and its own writes agree on the newest."""

from __future__ import annotations

from ecoserve_operator.cluster_api import PODS, Json
from ecoserve_operator.store import Store


def pod(name: str, version: int, namespace: str = "one", uid: str = "") -> Json:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"{namespace}/{name}",
            "resourceVersion": str(version),
            "labels": {"ecoserve.io/cluster": "demo"},
        }
    }


def known(store: Store, namespace: str = "one") -> dict[str, str]:
    pods = store.of(PODS, (namespace, "demo"))
    return {p["metadata"]["name"]: p["metadata"]["resourceVersion"] for p in pods}


def test_the_newest_stands() -> None:
    store = Store()
    for version in (5, 7, 6):
        store.put(PODS, pod("a", version))
    assert known(store) == {"a": "7"}


def test_what_is_gone_does_not_come_back_by_an_older_event() -> None:
    store = Store()
    store.put(PODS, pod("a", 5))
    store.drop(PODS, pod("a", 8), 8)
    store.put(PODS, pod("a", 7))
    assert known(store) == {}
    store.put(PODS, pod("a", 9, uid="another of its name"))
    assert known(store) == {"a": "9"}


def test_a_list_takes_away_what_it_lacks_and_leaves_what_is_newer() -> None:
    store = Store()
    for name, version in (("old", 5), ("kept", 6), ("new", 12)):
        store.put(PODS, pod(name, version))
    store.replace(PODS, [pod("kept", 6)], 10)
    assert known(store) == {"kept": "6", "new": "12"}


def test_a_list_says_nothing_of_another_namespace() -> None:
    """Namespaces are listed one after the other: what was made in the first meanwhile is older than
    the list of the second, and in neither."""
    store = Store()
    store.replace(PODS, [], 10, "one")
    store.put(PODS, pod("a", 11))
    store.replace(PODS, [pod("b", 9, "two")], 12, "two")
    assert known(store) == {"a": "11"}
    assert known(store, "two") == {"b": "9"}


def test_a_list_of_a_cluster_says_nothing_of_others() -> None:
    store = Store()
    store.put(PODS, pod("a", 5))
    store.put(PODS, pod("b", 5, "two"))
    store.replace(PODS, [], 10, "one", "other")
    store.replace(PODS, [], 10, "two", "demo")
    assert known(store) == {"a": "5"}
    assert known(store, "two") == {}
