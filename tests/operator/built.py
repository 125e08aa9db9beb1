"""EcoServeClusters of all kinds, and what is made of them."""

from __future__ import annotations

from typing import Any

import yaml
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import Builders, Installation

from tests.operator.manifests import example

Json = dict[str, Any]

INSTALLATION = Installation(
    worker_image="worker:1",
    gateway_image="operator:1",
    scheduler="ecoserve.system.svc:9002",
    scheduler_tls="ecoserve.system.svc:9004",
    scheduler_ip="10.1.2.3",
    inference_pools=True,
)
BUILDERS = Builders(INSTALLATION)

SPECS: dict[str, Json] = yaml.safe_load("""
least: {}
on GPUs:
  parallelism: {tensor: 2, pipeline: 2}
  engine:
    args: [--max-model-len, "8192", "$(HOME)"]
    env: [{name: NCCL_DEBUG, value: INFO}]
    imagePullSecrets: [{name: registry}]
    resources: {requests: {cpu: "8", memory: 64Gi}, limits: {memory: 64Gi}}
    sharedMemory: 16Gi
    startTimeout: 1h
  placement:
    nodeSelector: {gpu: l20}
    tolerations: [{key: nvidia.com/gpu, operator: Exists}]
    priorityClassName: high
    runtimeClassName: nvidia
  drain: {timeout: 90s}
  disruption: {maxUnavailable: 2}
on CPUs:
  device: {type: cpu}
  engine:
    resources: {requests: {cpu: 2500m}}
    env: [{name: VLLM_CPU_OMP_THREADS_BIND, value: "0-1"}]
from a volume: {model: {name: m, source: {pvc: {claimName: weights, path: /a/b}}}}
from an image: {model: {name: m, source: {imageVolume: {reference: "models/m:1", path: /m}}}}
without prefix cache: {kvTiers: {warm: false}}
with TLS and keys:
  gateway:
    replicas: 3
    tls: {secretName: cert}
    apiKeys: {secretName: keys}
    service: {type: LoadBalancer, port: 8443, annotations: {lb: internal}}
    bodyLimit: 4Mi
    idleTimeout: 5m
    podTemplate: {spec: {priorityClassName: high}}
with a relay: {gateway: {relay: {enabled: true, resources: {requests: {cpu: 2}}}}}
with peers:
  networkPolicy:
    prometheus: [{namespaceSelector: {matchLabels: {name: monitoring}}}]
    gateways: [{podSelector: {matchLabels: {app: gw}}}]
    clients: [{namespaceSelector: {}, podSelector: {matchLabels: {may: ask}}}]
bare:
  gateway: {enabled: false}
  networkPolicy: {enabled: false}
  monitoring: {enabled: false}
  inferencePool: {enabled: false}
with an overlay:
  podTemplate:
    metadata: {name: other, labels: {team: nlp, ecoserve.io/cluster: demo}}
    spec:
      containers:
        - {name: worker, env: [{name: EXTRA, value: "1"}]}
        - name: sidecar
          image: sidecar:1
          securityContext:
            allowPrivilegeEscalation: false
            capabilities: {drop: [ALL]}
""")


def cluster(spec: Json | str = "least", **more: Any) -> EcoServeCluster:
    given = SPECS[spec] if isinstance(spec, str) else spec
    body = example(**{**given, **more})
    body["metadata"] |= {"uid": "e4b8f6d2-0000-4000-8000-000000000000"}
    return EcoServeCluster.model_validate(body)


def worker(spec: Json | str = "least") -> Json:
    return BUILDERS.worker(cluster(spec), "demo-3")


def container(pod: Json, name: str = "worker") -> Json:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def objects(spec: Json | str = "least", builders: Builders = BUILDERS) -> dict[str, Json]:
    made = builders.objects(cluster(spec))
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in made}


def pods(spec: Json | str) -> list[Json]:
    found = [worker(spec)]
    for name, item in objects(spec).items():
        if name.startswith("Deployment/"):
            found.append(item["spec"]["template"])
    return found
