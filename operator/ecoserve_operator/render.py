"""What the controller needs of the builders."""

from __future__ import annotations

from typing import Protocol

from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.cluster_api import Json


class Render(Protocol):
    """Pure: makes objects from an EcoServeCluster. ValueError names the field that is wrong."""

    def revision(self, cluster: EcoServeCluster) -> str:
        """The hash of what a worker Pod is made from, fit for a label."""
        ...

    def worker(self, cluster: EcoServeCluster, name: str) -> Json:
        """A worker Pod without labels and owner of ours."""
        ...

    def objects(self, cluster: EcoServeCluster) -> list[Json]:
        """All else that belongs to the cluster."""
        ...

    def url(self, cluster: EcoServeCluster) -> str:
        """Where clients inside of Kubernetes reach it."""
        ...
