"""`ecoserve bench` on the command line. What it runs is imported when it runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Api(StrEnum):
    chat = "chat"
    completions = "completions"


def bench(
    url: Annotated[
        str, typer.Option(metavar="URL", help="The endpoint, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Sent with each call."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; else the only one that is served.")
    ] = None,
    api: Annotated[Api, typer.Option(help="Which of OpenAI's calls to make.")] = Api.chat,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Steps of so many requests at once. With neither this nor --rate, it doubles"
            " from 1 until too few requests meet their SLOs.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R,R,...", help="Steps of so many requests a second, open loop."),
    ] = None,
    goodput: Annotated[
        bool | None,
        typer.Option(
            "--goodput/--no-goodput",
            help="Search the highest rate at which enough requests meet both SLOs; done unless"
            " steps are given.",
        ),
    ] = None,
    ttft_slo: Annotated[
        str, typer.Option(metavar="S|Nx", help="Seconds, or a multiple of the unloaded TTFT.")
    ] = "5x",
    tpot_slo: Annotated[
        str, typer.Option(metavar="S|Nx", help="Seconds, or a multiple of the unloaded TPOT.")
    ] = "2x",
    attainment: Annotated[
        float, typer.Option(help="Share of the requests that has to meet both SLOs.")
    ] = 0.9,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="alpaca, sharegpt or longbench by their published lengths, or a trace: Azure's"
            " CSV, Mooncake's JSONL.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|MEDIAN:MEAN", help="Without --data: fixed or lognormal.")
    ] = "200",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|MEDIAN:MEAN", help="Without --data: fixed or lognormal.")
    ] = "64",
    cv: Annotated[
        float | None,
        typer.Option(
            help="Spread of the gaps between arrivals: Gamma, 1 is Poisson, 0.01 all but even."
            " Else as a trace has them, or Poisson."
        ),
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 1,
    think: Annotated[float, typer.Option(help="Seconds from an answer to the next turn.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Length of a run.")] = 60.0,
    warmup: Annotated[
        float, typer.Option(help="Seconds of it, at its beginning, that do not count.")
    ] = 10.0,
    repeats: Annotated[int, typer.Option(help="Runs of each rate, of different seeds.")] = 2,
    unloaded_calls: Annotated[
        int, typer.Option(help="Calls that are made one by one, for the unloaded figures.")
    ] = 8,
    precision: Annotated[
        float, typer.Option(help="The goodput's bracket, relative, that is close enough.")
    ] = 0.05,
    most_rates: Annotated[int, typer.Option(help="Rates that the search may try.")] = 10,
    timeout: Annotated[float, typer.Option(help="Seconds after which a call has failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths and gaps.")] = 1,
    salt: Annotated[
        int | None,
        typer.Option(help="Of the prompts' words; else new, so that no cache holds them yet."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For bench.json, CSV files, pictures.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON on standard output.")
    ] = False,
) -> None:
    """Load an OpenAI-compatible endpoint step by step, and find its goodput."""
    console = Console(stderr=as_json, highlight=False)
    try:
        from ecoserve.bench.command import bench as run
        from ecoserve.bench.endpoint import Promise
        from ecoserve.bench.plan import Plan, numbers, whole_numbers

        if out is not None:
            from ecoserve.bench import plots  # noqa: F401 (not missing only when all was measured)
    except ModuleNotFoundError as error:
        console.print(f"[red]{error.name} is missing: pip install 'ecoserve\\[bench]'[/red]")
        raise typer.Exit(1) from error
    try:
        plan = Plan(
            url=url.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            model=model,
            api=api.value,
            concurrency=whole_numbers(concurrency, "--concurrency"),
            rates=numbers(rate, "--rate"),
            search=goodput if goodput is not None else concurrency is None and rate is None,
            data=data,
            prompt=prompt_tokens,
            output=output_tokens,
            cv=cv,
            turns=turns,
            think=think,
            ttft=Promise.parse(ttft_slo, "--ttft-slo"),
            tpot=Promise.parse(tpot_slo, "--tpot-slo"),
            attainment=attainment,
            seconds=seconds,
            warmup=warmup,
            repeats=repeats,
            unloaded_calls=unloaded_calls,
            precision=precision,
            most_rates=most_rates,
            timeout=timeout,
            seed=seed,
            **({} if salt is None else {"salt": salt}),
            out=out,
        )
    except ValueError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    sys.stdout.flush()
    raise typer.Exit(run(plan, console, as_json=as_json))
