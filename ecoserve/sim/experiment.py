"""Experiment files: YAML that says what to simulate, and the cells that it stands for.

Most fields take one value or a list; every combination is a cell. A file may hold several
experiments, separated by ``---``. ``docs/experiments`` has examples.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ecoserve import numbers
from ecoserve.policy.state import SLO
from ecoserve.sim import limits, variants, workload
from ecoserve.sim.cost import CostModel
from ecoserve.sim.hardware import gpu as gpu_named
from ecoserve.sim.models import BYTES, Model
from ecoserve.sim.models import model as model_named
from ecoserve.sim.records import Cluster, Options, Wire
from ecoserve.sim.systems import Routing, System

_Seconds = Annotated[float, AfterValidator(numbers.SECONDS.valid)]
_Wait = Annotated[float, AfterValidator(numbers.WAIT.valid)]
_Mixing = Annotated[float, AfterValidator(limits.MIXING.valid)]
_Error = Annotated[float, AfterValidator(limits.ERROR.valid)]
_Price = Annotated[float, AfterValidator(limits.PRICE.valid)]
_Bus = Annotated[float, AfterValidator(limits.BUS.valid)]
_Share = Annotated[float, AfterValidator(numbers.SHARE.valid)]
_Cv = Annotated[float, AfterValidator(numbers.CV.valid)]
_Percentile = Annotated[float, AfterValidator(limits.PERCENTILE.valid)]
_Gpus = Annotated[int, AfterValidator(limits.GPUS.valid)]
_Parallel = Annotated[int, AfterValidator(limits.PARALLEL.valid)]
_Seed = Annotated[int, AfterValidator(numbers.SEED.valid)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Promise(_Strict):
    """SLOs in seconds."""

    ttft: _Seconds
    tpot: _Seconds


class SystemSpec(_Strict):
    """A system by its name (``variants``) and settings that differ from the usual ones."""

    model_config = ConfigDict(extra="allow", frozen=True)

    system: str
    label: str = ""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"system": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _known(self) -> SystemSpec:
        variants.check(self.system, self.settings)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        return self.__pydantic_extra__ or {}

    @property
    def name(self) -> str:
        """The label, else the name with its settings."""
        if self.label:
            return self.label
        return " ".join([self.system, *(f"{k}={v}" for k, v in sorted(self.settings.items()))])


class Layout(_Strict):
    """Tensor and pipeline parallelism of an instance."""

    tp: _Parallel
    pp: _Parallel = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "")


class _Study(_Strict):
    """What all cells of an experiment share.

    ``requests`` is how many a run measures at the bound's rate, for ``min_seconds`` at least, after
    ``warmup`` seconds. ``published`` judges by the paper's definitions of TTFT and TPOT. ``price``
    is dollars an hour for a GPU, None the table's. ``chunks`` and ``routings`` are searched.
    """

    slo: Promise | None = None
    requests: Annotated[int, AfterValidator(limits.REQUESTS.valid)] = 10_000
    min_seconds: _Seconds = 300.0
    warmup: _Wait = 150.0
    resolution: float = Field(default=0.01, gt=0, lt=1)
    seeds: tuple[_Seed, ...] = Field(default=(11, 12, 13), min_length=1)
    tune_seeds: tuple[_Seed, ...] = Field(default=(1, 2), min_length=1)
    published: bool = False
    price: _Price | None = None
    chunks: tuple[Annotated[int, AfterValidator(numbers.COUNT.valid)], ...] = Field(
        default=variants.CHUNKS, min_length=1
    )
    routings: tuple[Routing, ...] = Field(default=variants.ROUTINGS, min_length=1)

    @model_validator(mode="after")
    def _apart(self) -> _Study:
        both = set(self.seeds) & set(self.tune_seeds)
        if both:
            raise ValueError(f"seeds and tune_seeds must differ, both have {sorted(both)}")
        return self


class Cell(_Study):
    """One system on one kind of hardware under one workload: what a goodput is found for.

    ``layout`` None searches it. ``bus`` is the all-reduce bus bandwidth in GB/s, None the GPU's
    own. ``noise``, ``report_delay`` and ``output_error`` are as in ``records.Options``.
    """

    model: str
    gpu: str
    gpus: _Gpus
    layout: Layout | None
    data: str
    percentile: _Percentile
    system: SystemSpec
    mixing: _Mixing = 0.0
    overlap: _Share = 0.0
    bus: _Bus | None = None
    cv: _Cv | None = None
    noise: _Error = 0.0
    report_delay: _Wait = 0.0
    output_error: _Error | None = None
    prefix_sharing: bool = False

    @property
    def key(self) -> str:
        """The same for the same cell, whatever else an experiment holds."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def played(self) -> Cell:
        """The cell whose runs are this one's too: what mixed steps cost says nothing of a system
        that makes none."""
        if not self.mixing or variants.mixes(self.system.system):
            return self
        return self.model_copy(update={"mixing": 0.0})

    @property
    def target(self) -> float:
        return self.percentile / 100

    @property
    def hourly(self) -> float:
        """Dollars an hour for a GPU."""
        return gpu_named(self.gpu).price if self.price is None else self.price

    def workload(self) -> workload.Workload:
        """Raises ``ValueError`` for a data set or a trace that is not there."""
        slo = None if self.slo is None else SLO(self.slo.ttft, self.slo.tpot)
        return workload.load(self.data, slo=slo, cv=self.cv)

    def layouts(self) -> list[Layout]:
        """The layout, or all that fit if it is to be searched."""
        return [self.layout] if self.layout else fitting(self.model, self.gpu, self.gpus)

    def cluster(self, layout: Layout) -> Cluster:
        """Raises ``ValueError`` if the model does not fit so."""
        return make_cluster(
            self.model,
            self.gpu,
            self.gpus,
            layout,
            mixing=self.mixing,
            overlap=self.overlap,
            bus=self.bus,
        )

    def systems(self, cluster: Cluster) -> list[System]:
        """The system, or all that a search has to choose from."""
        return variants.build(
            self.system.system,
            self.system.settings,
            cluster,
            chunks=self.chunks,
            routings=self.routings,
        )

    def options(self, *, seed: int = 0, keep_steps: bool = False) -> Options:
        return Options(
            seed=seed,
            noise=self.noise,
            report_delay=self.report_delay,
            output_error=self.output_error,
            prefix_sharing=self.prefix_sharing,
            keep_steps=keep_steps,
        )


def usual_layout(model: Model, gpu: str) -> Layout:
    """The fewest GPUs whose memory the weights fill by half at most, all tensor parallel.

    This is TP 4 for Llama-30B and CodeLlama-34B and 8 for Qwen2-72B on L20, TP 2, 2 and 4 on A800:
    as published. Where none is that small, the largest TP of a node.
    """
    card = gpu_named(gpu)
    allowed = [tp for tp in model.tensor_parallel if tp <= card.gpus]
    weights = BYTES * model.weights
    return Layout(tp=next((t for t in allowed if weights <= t * card.memory / 2), allowed[-1]))


def fitting(model: str, gpu: str, gpus: int) -> list[Layout]:
    """All layouts within a node that hold the model, the fewest GPUs first."""
    shape, card = model_named(model), gpu_named(gpu)
    found = []
    for tp, pp in product(shape.tensor_parallel, (1, 2, 4, 8)):
        layout = Layout(tp=tp, pp=pp)
        if layout.gpus > min(card.gpus, gpus) or gpus % layout.gpus:
            continue
        try:
            CostModel(shape, card, tp=tp, pp=pp)
        except ValueError:
            continue
        found.append(layout)
    if not found:
        raise ValueError(f"no layout of {model} fits on {gpus} {gpu}")
    return sorted(found, key=lambda layout: (layout.gpus, layout.pp))


def make_cluster(
    model: str,
    gpu: str,
    gpus: int,
    layout: Layout,
    *,
    mixing: float = 0.0,
    overlap: float = 0.0,
    bus: float | None = None,
) -> Cluster:
    """Instances of that layout on ``gpus`` GPUs in full nodes; ``bus`` in GB/s.

    Raises ``ValueError`` that names the field for what does not fit.
    """
    card = gpu_named(gpu)
    if gpus % layout.gpus:
        raise ValueError(f"gpus: {gpus} is not a multiple of {layout} = {layout.gpus} GPUs")
    cost = CostModel(
        model_named(model),
        card,
        tp=layout.tp,
        pp=layout.pp,
        mixing=mixing,
        overlap=overlap,
        bus=None if bus is None else bus * 1e9,
    )
    instances = gpus // layout.gpus
    return Cluster(
        cost,
        instances,
        per_node=min(instances, card.gpus // layout.gpus),
        # Each GPU of an instance sends its own shard over its own link.
        pcie=Wire(layout.gpus * card.peer.rate, card.peer.utilisation, card.peer.latency),
        network=Wire(card.nic.rate, card.nic.utilisation, card.nic.latency),
    )


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


_Many = BeforeValidator(_listed)
_Name = Annotated[tuple[str, ...], _Many, Field(min_length=1)]


class Experiment(_Study):
    """What a YAML file says. Each field with a list stands for every one of its values.

    Either ``gpus`` or ``instances`` says how large the cluster is. ``layout`` is ``usual``
    (``usual_layout``), ``best`` (searched for each system) or a mapping of ``tp`` and ``pp``.
    """

    name: str = "experiment"
    model: _Name
    gpu: _Name
    gpus: Annotated[tuple[_Gpus, ...], _Many] = ()
    instances: Annotated[tuple[_Gpus, ...], _Many] = ()
    layout: Annotated[tuple[Layout | Literal["usual", "best"], ...], _Many, Field(min_length=1)] = (
        "usual",
    )
    data: _Name = ("sharegpt",)
    percentile: Annotated[tuple[_Percentile, ...], _Many, Field(min_length=1)] = (90.0,)
    systems: Annotated[tuple[SystemSpec, ...], _Many, Field(min_length=1)]
    mixing: Annotated[tuple[_Mixing, ...], _Many, Field(min_length=1)] = (0.0,)
    overlap: Annotated[tuple[_Share, ...], _Many, Field(min_length=1)] = (0.0,)
    bus: Annotated[tuple[_Bus | None, ...], _Many, Field(min_length=1)] = (None,)
    cv: Annotated[tuple[_Cv | None, ...], _Many, Field(min_length=1)] = (None,)
    noise: Annotated[tuple[_Error, ...], _Many, Field(min_length=1)] = (0.0,)
    report_delay: Annotated[tuple[_Wait, ...], _Many, Field(min_length=1)] = (0.0,)
    output_error: Annotated[tuple[_Error | None, ...], _Many, Field(min_length=1)] = (None,)
    prefix_sharing: bool = False

    @field_validator("model")
    @classmethod
    def _models(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(model_named(name).name for name in names)

    @field_validator("gpu")
    @classmethod
    def _gpus(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(gpu_named(name).name for name in names)

    @model_validator(mode="after")
    def _whole(self) -> Experiment:
        if bool(self.gpus) == bool(self.instances):
            raise ValueError("either gpus or instances must be given")
        if self.instances and "best" in self.layout:
            raise ValueError("layout best needs gpus, as instances would differ in size")
        names = [spec.name for spec in self.systems]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"systems: {', '.join(sorted(twice))} twice; give them a label")
        promised = None if self.slo is None else SLO(self.slo.ttft, self.slo.tpot)
        for data in self.data:
            workload.load(data, slo=promised)
        return self

    def cells(self) -> Iterator[Cell]:
        """All combinations; the last named fields change fastest, systems fastest of all."""
        shared = {name: getattr(self, name) for name in _Study.model_fields}
        sizes = self.gpus or self.instances
        for model, gpu, size, layout in product(self.model, self.gpu, sizes, self.layout):
            found = usual_layout(model_named(model), gpu) if layout == "usual" else layout
            fixed = found if isinstance(found, Layout) else None
            count = size if self.gpus else size * (fixed.gpus if fixed else 1)
            axes = {
                name: getattr(self, name)
                for name in (
                    "percentile",
                    "mixing",
                    "overlap",
                    "bus",
                    "cv",
                    "noise",
                    "report_delay",
                    "output_error",
                    "data",
                )
            }
            for values in product(*axes.values()):
                for spec in self.systems:
                    yield Cell(
                        model=model,
                        gpu=gpu,
                        gpus=count,
                        layout=fixed,
                        system=spec,
                        prefix_sharing=self.prefix_sharing,
                        **dict(zip(axes, values, strict=True)),
                        **shared,
                    )


def load(path: Path) -> list[Experiment]:
    """The experiments of a file.

    Raises ``ValueError`` that names file, field and what is allowed.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    documents = [document for document in documents if document is not None]
    if not documents:
        raise ValueError(f"{path} holds no experiment")
    return [parse(_beside(document, path.parent), str(path)) for document in documents]


def _beside(document: Any, folder: Path) -> Any:
    """The document with traces that lie beside the file by their full path."""
    if not isinstance(document, dict) or "data" not in document:
        return document
    names = [
        str(folder / name) if isinstance(name, str) and (folder / name).is_file() else name
        for name in _listed(document["data"])
    ]
    return {**document, "data": names}


def parse(document: Any, source: str) -> Experiment:
    """The experiment that a mapping describes; ``source`` is where it comes from, for errors."""
    if not isinstance(document, dict):
        raise ValueError(f"{source}: an experiment is a mapping of fields, not {document!r}")
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{source}: {explain(error, Experiment)}") from None


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong, a line a field, in the file's own words."""
    return "; ".join(_lines(error, kind.model_fields))


def _lines(error: ValidationError, fields: Iterable[str]) -> Iterator[str]:
    known = list(fields)
    for problem in error.errors(include_url=False):
        places = [str(part) for part in problem["loc"]]
        where = ".".join(places)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden" and len(places) == 1:
            near = difflib.get_close_matches(places[0], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            yield f"{where} is not a field; {hint}"
        elif problem["type"] == "missing":
            yield f"{where} is missing"
        elif problem["type"] == "value_error":
            yield message if message.startswith(where) else f"{where}: {message}"
        else:
            message = message.removeprefix("Input ")
            yield f"{where}: {message}, not {problem['input']!r}"
