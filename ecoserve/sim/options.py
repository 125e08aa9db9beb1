"""Options that commands of the simulator share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecoserve import numbers
from ecoserve.sim import limits
from ecoserve.sim.hardware import GPUS
from ecoserve.sim.models import MODELS

if TYPE_CHECKING:
    from ecoserve.policy.state import SLO
    from ecoserve.sim.experiment import Experiment


def to_write(path: Path | None) -> Path | None:
    """The callback of an option that names a file to be written, so that no run is in vain."""
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def to_draw(path: Path | None) -> Path | None:
    """The same of a picture."""
    if path is None:
        return None
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise typer.BadParameter(f"pictures need ecoserve[bench]: {error}") from error
    if path.suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise typer.BadParameter(
            f"{path} must end in one of .{', .'.join(FigureCanvasBase.filetypes)}"
        )
    return to_write(path)


_ONE = (
    "vllm, sarathi-CHUNK, distserve-P:D, mooncake-P:D, a policy (paper, padg, window, paced), "
    "default"
)
_SYSTEMS = f"{_ONE}; vllm-best, sarathi-best ... search the setting. Repeat for more."

Systems = Annotated[list[str], typer.Option("--system", "-s", metavar="NAME", help=_SYSTEMS)]
One = Annotated[str, typer.Option("--system", "-s", metavar="NAME", help=f"{_ONE}.")]
ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME", help=f"One of {', '.join(MODELS)}.")
]
GpuName = Annotated[str, typer.Option("--gpu", metavar="NAME", help=f"One of {', '.join(GPUS)}.")]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        "-r",
        help="Requests a second; else 0.8 of the fluid bound.",
        callback=limits.RATE.option,
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs in all.", callback=limits.GPUS.option)]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        help="Tensor parallelism; else the usual one.",
        callback=limits.PARALLEL.option,
    ),
]
Pp = Annotated[
    int, typer.Option("--pp", help="Pipeline parallelism.", callback=limits.PARALLEL.option)
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="NAME|FILE",
        help="alpaca, sharegpt, longbench, or a trace (.csv, .jsonl[.gz]).",
    ),
]
Ttft = Annotated[
    float | None,
    typer.Option(
        "--ttft-slo",
        help="Seconds to the first token; else the data's.",
        callback=numbers.SECONDS.option,
    ),
]
Tpot = Annotated[
    float | None,
    typer.Option(
        "--tpot-slo",
        help="Seconds for each further token; else 0.1.",
        callback=numbers.SECONDS.option,
    ),
]
Cv = Annotated[
    float | None,
    typer.Option(
        "--cv",
        help="Burstiness: variation of the gaps (Gamma); 1 is Poisson.",
        callback=numbers.CV.option,
    ),
]
Mixing = Annotated[
    float,
    typer.Option(
        "--mixing",
        help="How much longer a mixed step takes, such as 0.2.",
        callback=limits.MIXING.option,
    ),
]
Overlap = Annotated[
    float,
    typer.Option(
        "--overlap", help="Share of all-reduce that is hidden.", callback=numbers.SHARE.option
    ),
]
Bus = Annotated[
    float | None,
    typer.Option(
        "--bus",
        help="All-reduce bus bandwidth, GB/s; else the GPU's.",
        callback=limits.BUS.option,
    ),
]
Percentile = Annotated[
    float,
    typer.Option(
        "--percentile",
        "-p",
        help="Per cent of requests that keep both SLOs.",
        callback=limits.PERCENTILE.option,
    ),
]
Requests = Annotated[
    int,
    typer.Option(
        "--requests",
        "-n",
        help="Requests that a run measures, for two minutes at least.",
        callback=limits.REQUESTS.option,
    ),
]
Warmup = Annotated[
    float,
    typer.Option("--warmup", help="Seconds that are not measured.", callback=numbers.WAIT.option),
]
Seeds = Annotated[
    int, typer.Option("--seeds", help="How many seeds are averaged.", callback=limits.SEEDS.option)
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.", callback=numbers.SEED.option)]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", help="Processes; else one a core.", callback=limits.JOBS.option),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(
        "--results",
        metavar="FILE",
        help="Where finished cells are kept (.jsonl) and found again.",
        callback=to_write,
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what the results file has.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        help="Begin no cell after so many minutes.",
        callback=limits.BUDGET.option,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write results as JSON.", callback=to_write),
]
CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Write results as CSV.", callback=to_write),
]
MarkdownFile = Annotated[
    Path | None,
    typer.Option(
        "--markdown", metavar="FILE", help="Write the tables as Markdown.", callback=to_write
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw the goodputs (needs [bench]).", callback=to_draw
    ),
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
    float | None,
    typer.Option(
        "--price",
        help="Dollars an hour for a GPU; else indicative.",
        callback=limits.PRICE.option,
    ),
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
        try:
            return parse({k: v for k, v in document.items() if v is not None}, "options")
        except ValueError as error:
            raise ValueError(str(error).removeprefix("options: ")) from error


def promise(data: str, ttft: float | None, tpot: float | None) -> SLO | None:
    """The SLOs that options ask for, the data's own where one is not given; None: both are its own.

    Raises ``ValueError`` that names the option.
    """
    from ecoserve.policy.state import SLO
    from ecoserve.sim.workload import DATASETS

    if ttft is None and tpot is None:
        return None
    known = DATASETS.get(data)
    if ttft is None:
        if known is None:
            known_names = ", ".join(DATASETS)
            raise ValueError(f"--ttft-slo must be given for {data}, which is none of {known_names}")
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
