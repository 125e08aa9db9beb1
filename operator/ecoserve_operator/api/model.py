"""``spec.model``: which model, and where its weights are."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from ecoserve_operator.api.common import Image, Path, PullPolicy
from ecoserve_operator.fields import Object, ObjectName, Rule, immutable


class ClaimSource(Object):
    """A PersistentVolumeClaim that holds the weights."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the cluster's namespace. Several nodes must be able to
    mount it (ReadOnlyMany or ReadWriteMany) if workers are to run on several nodes."""
    path: Path = "/"
    """Directory of the model inside the volume."""


class WorkerImageSource(Object):
    """A directory of the worker image that holds the weights."""

    path: Path
    """Directory of the model inside the worker image (spec.engine.image)."""


class ImageVolumeSource(Object):
    """An OCI image with the weights, mounted as a volume. Needs Kubernetes 1.33 or later with image
    volumes switched on."""

    reference: Image
    """The OCI image that holds the weights."""
    pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled."""
    path: Path = "/"
    """Directory of the model inside the image."""


class ModelSource(Object):
    """Where the weights are. Exactly one of the fields must be set."""

    rules = (
        Rule(
            "[has(self.pvc), has(self.image), has(self.imageVolume)].filter(x, x).size() == 1",
            "exactly one of pvc, image, imageVolume must be set",
            lambda self: sum(x is not None for x in (self.pvc, self.image, self.image_volume)) == 1,
        ),
    )

    pvc: ClaimSource | None = None
    """Weights in a PersistentVolumeClaim."""
    image: WorkerImageSource | None = None
    """Weights in the worker image itself."""
    image_volume: ImageVolumeSource | None = None
    """Weights in an OCI image of their own, mounted as a volume."""


class Model(Object):
    """The model to serve."""

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$"),
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [
                    immutable("clients call the model by it; make a new EcoServeCluster").schema()
                ]
            }
        ),
    ]
    """What clients call the model in their requests. Immutable."""
    source: ModelSource
    """Where the weights are."""
