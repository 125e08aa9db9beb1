"""Options that commands of the simulator share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ecoserve.policy.state import SLO
    from ecoserve.sim.experiment import Experiment

_SYSTEMS = (
    "vllm, sarathi-CHUNK, distserve-P:D, mooncake-P:D, a policy (paper, padg, window, paced), "
    "default; vllm-best, sarathi-best ... search the setting. Repeat for more."
)

Systems = Annotated[list[str], typer.Option("--system", "-s", metavar="NAME", help=_SYSTEMS)]
One = Annotated[str, typer.Option("--system", "-s", metavar="NAME", help=_SYSTEMS[:-22])]
ModelName = Annotated[str, typer.Option("--model", help="Model, such as CodeLlama-34B.")]
GpuName = Annotated[str, typer.Option("--gpu", help="GPU, such as L20.")]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="GPUs in all.")]
Tp = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor parallelism; else the usual one.")
]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallelism.")]
Data = Annotated[
    str, typer.Option("--data", help="alpaca, sharegpt, longbench, or a trace (.csv, .jsonl[.gz]).")
]
Ttft = Annotated[
    float | None, typer.Option("--ttft-slo", help="Seconds to the first token; else the data's.")
]
Tpot = Annotated[
    float | None, typer.Option("--tpot-slo", help="Seconds for each further token; else 0.1.")
]
Cv = Annotated[
    float | None,
    typer.Option("--cv", help="Burstiness: variation of the gaps (Gamma); 1 is Poisson."),
]
Mixing = Annotated[
    float, typer.Option("--mixing", help="How much longer a mixed step takes, such as 0.2.")
]
Overlap = Annotated[float, typer.Option("--overlap", help="Share of all-reduce that is hidden.")]
Bus = Annotated[
    float | None, typer.Option("--bus", help="All-reduce bus bandwidth, GB/s; else the GPU's.")
]
Percentile = Annotated[
    float, typer.Option("--percentile", "-p", help="Per cent of requests that keep both SLOs.")
]
Requests = Annotated[
    int,
    typer.Option(
        "--requests", "-n", min=1, help="Requests that a run measures, for two minutes at least."
    ),
]
Warmup = Annotated[float, typer.Option("--warmup", help="Seconds that are not measured.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds are averaged.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes; else one a core.")
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(
        "--results", metavar="FILE", help="Where finished cells are kept (.jsonl) and found again."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what the results file has.")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", help="Begin no cell after so many minutes.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write results as JSON.")
]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write results as CSV.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the goodputs (needs [bench]).")
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        help="Count the wait between first token and decode to TPOT; else to TTFT, as published.",
    ),
]
Published = Annotated[
    bool,
    typer.Option(
        "--published", help="Count the wait between first token and decode to TTFT, not TPOT."
    ),
]
Price = Annotated[
    float | None, typer.Option("--price", help="Dollars an hour for a GPU; else indicative.")
]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, as options say it: the model, the hardware and the load."""

    model: ModelName = "CodeLlama-34B"
    gpu: GpuName = "L20"
    gpus: Gpus = 32
    tp: Tp = None
    pp: Pp = 1
    data: Data = "sharegpt"
    ttft_slo: Ttft = None
    tpot_slo: Tpot = None
    cv: Cv = None
    mixing: Mixing = 0.0
    overlap: Overlap = 0.0
    bus: Bus = None

    def experiment(self, **more: Any) -> Experiment:
        """The experiment with these further fields (those that are None left out).

        Raises ``ValueError``, which names fields as options do.
        """
        from ecoserve.sim.experiment import parse

        names = ("model", "gpu", "gpus", "data", "cv", "mixing", "overlap", "bus")
        document: dict[str, Any] = {name: getattr(self, name) for name in names}
        # Shorter runs flatter: what has not finished when the last request comes costs nothing.
        document["min_seconds"] = 120
        if self.tp is not None:
            document["layout"] = {"tp": self.tp, "pp": self.pp}
        elif self.pp > 1:
            raise ValueError("--pp needs --tp")
        slo = promise(self.data, self.ttft_slo, self.tpot_slo)
        if slo is not None:
            document["slo"] = {"ttft": slo.ttft, "tpot": slo.tpot}
        document |= {name: value for name, value in more.items() if value is not None}
        return parse({k: v for k, v in document.items() if v is not None}, "options")


def promise(data: str, ttft: float | None, tpot: float | None) -> SLO | None:
    """The SLOs that options ask for, the data's own where one is not given; None: both are its own.

    Raises ``ValueError`` that names the option.
    """
    from ecoserve.policy.state import SLO
    from ecoserve.sim.workload import DATASETS

    if ttft is None and tpot is None:
        return None
    for option, value in (("--ttft-slo", ttft), ("--tpot-slo", tpot)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} must be a positive number of seconds, not {value}")
    known = DATASETS.get(data)
    if ttft is None:
        if known is None:
            raise ValueError("--ttft-slo must be given for a trace")
        ttft = known.slo.ttft
    return SLO(ttft, 0.1 if tpot is None else tpot)


def with_scenario(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of ``Scenario`` that it does not have itself; it is
    called with them as ``scenario``."""
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["scenario"]
    shared = inspect.signature(Scenario, eval_str=True).parameters
    names = [field.name for field in fields(Scenario) if field.name not in own]

    @functools.wraps(command)
    def called(**options: Any) -> None:
        scenario = Scenario(**{name: options.pop(name) for name in names})
        command(scenario=scenario, **options)

    parameters = [*own.values(), *(shared[name] for name in names)]
    # What typer reads.
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called
