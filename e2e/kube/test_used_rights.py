"""The chart's roles grant what the tests of this folder made use of, no more and no less.

Of all of them, so it is of use only after a whole run: pytest takes it last. ``AUDIT_LOG`` names
the file to which the API server writes what ``audit.POLICY`` says.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from e2e.kube.audit import granted, used
from e2e.kube.kube import CHART, Kube

LOG = os.environ.get("AUDIT_LOG")

# After the answer to a write was lost, which no test brings about here: tests/operator does.
ELSEWHERE = {("", "pods", "get")}

pytestmark = pytest.mark.skipif(
    not LOG, reason="AUDIT_LOG is not set: the audit log of the API server, as audit.POLICY has it"
)


def test_rights_granted_are_rights_used(kube: Kube) -> None:
    text = kube.helm("template", "ecoserve", str(CHART), "-n", "system")
    allowed = granted(filter(None, yaml.safe_load_all(text)))
    rights, _ = used(Path(str(LOG)), "system:serviceaccount:system-[^:]+:ecoserve")
    # What is refused is among them: the roles may go before the operator, but no more is asked for.
    assert rights - allowed == set(), "used, though not granted by the chart"
    assert allowed - rights - ELSEWHERE == set(), "granted, but nothing that was done needs it"
