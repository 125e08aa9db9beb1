"""Objects of an EcoServeCluster, made from its spec. Pure: no API server, no clock, no files."""

from __future__ import annotations

from dataclasses import dataclass

from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import common, gateway, inference, monitoring, network, worker
from ecoserve_operator.builders.common import Installation, Json
from ecoserve_operator.builders.overlay import OverlayError

__all__ = ["Builders", "Installation", "OverlayError"]


@dataclass(frozen=True, slots=True)
class Builders:
    """All builders, for one installation of the operator. ``ValueError`` names the field of the
    spec that nothing can be made of; an ``OverlayError`` that of an overlay."""

    installation: Installation

    def revision(self, cluster: EcoServeCluster) -> str:
        """The hash of what a worker Pod is made from, fit for a label."""
        return worker.revision(cluster)

    def worker(self, cluster: EcoServeCluster, name: str) -> Json:
        """A worker Pod, without owner, macro instance and revision."""
        return worker.worker(cluster, name, self.installation)

    def objects(self, cluster: EcoServeCluster) -> list[Json]:
        """All else that belongs to the cluster; what needs the CRDs of others is among it."""
        return [
            common.service_account(cluster, common.WORKER),
            network.budget(cluster),
            *network.objects(cluster),
            *gateway.objects(cluster, self.installation),
            *inference.objects(cluster, self.installation),
            *monitoring.objects(cluster),
        ]

    def url(self, cluster: EcoServeCluster) -> str:
        """Where clients inside of Kubernetes reach it."""
        return gateway.url(cluster)
