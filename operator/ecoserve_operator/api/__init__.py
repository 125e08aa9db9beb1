"""The custom resources, ``ecoserve.io/v1alpha1``: ``EcoServeCluster`` and ``MacroInstance``.

The CRDs in ``crds/`` are generated from these models (``make crds``), the docstrings included: they
are what ``kubectl explain`` shows. Durations are strings outside ("10m") and seconds in Python.
"""

from __future__ import annotations

from ecoserve_operator.api.cluster import EcoServeCluster, EcoServeClusterSpec
from ecoserve_operator.api.common import API_VERSION, GROUP, VERSION
from ecoserve_operator.api.macro_instance import MacroInstance

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "EcoServeCluster",
    "EcoServeClusterSpec",
    "MacroInstance",
]
