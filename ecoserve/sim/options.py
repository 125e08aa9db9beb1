"""Options that commands of the simulator share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
