"""The `ecoserve` command."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ecoserve import __version__
from ecoserve.bench.options import bench
from ecoserve.policy import DEFAULT, POLICIES
from ecoserve.sim import commands as sim

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a fault of ours is reported as Python does
)


class Late(StrEnum):
    serve = "serve"
    shed = "shed"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ecoserve {__version__}")
        raise typer.Exit


@app.callback()
def _ecoserve(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """LLM serving with prefill and decode separated in time."""


@app.command(short_help="Serve a model on this machine, until Ctrl-C.")
def up(
    workers: Annotated[
        int, typer.Option("--workers", "--instances", help="Instances to run, at first.")
    ] = 2,
    max_workers: Annotated[
        int | None,
        typer.Option("--max", help="The most instances, as the load asks for them; else no more."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on.", min=1, max=65535)] = 8000,
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory; without it SmolLM2-135M-Instruct is fetched."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in calls; else that of its directory.")
    ] = None,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = DEFAULT,
    policy_setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A setting of the policy; repeat."),
    ] = None,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Seconds to the first token; else derived.")
    ] = None,
    tpot_slo: Annotated[
        float | None, typer.Option(help="Seconds for each further token; else derived.")
    ] = None,
    late: Annotated[
        Late, typer.Option(help="What becomes of a request whose TTFT cannot be met.")
    ] = Late.serve,
    queue_limit: Annotated[
        int, typer.Option(help="Requests that may wait; of more, some get a 429.")
    ] = 1024,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Ask clients for this key; repeat for more."),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for one of the keys in the file.")
    ] = None,
    body_limit: Annotated[
        int, typer.Option(metavar="BYTES", help="Largest body of a request.")
    ] = 16 << 20,
    debug_mode: Annotated[
        bool,
        typer.Option("--debug_mode", "--debug-mode", help="Log each phase switch with its reason."),
    ] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Show the logs of all processes.")] = False,
    engine_args: Annotated[
        str, typer.Option(metavar="ARGS", help="Further arguments of vLLM, as one string.")
    ] = "",
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Have torch compile the model: faster, but starts slowly."),
    ] = False,
    relay: Annotated[
        bool,
        typer.Option(
            "--relay", help="Streams that ask for it go on on another worker when theirs dies."
        ),
    ] = False,
    macro: Annotated[
        str | None,
        typer.Option(
            metavar="N_l:N_u", help="Least and most instances of a macro instance, such as 2:4."
        ),
    ] = None,
    scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="When to scale, such as expand.use=0.8; repeat."),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Prometheus to scale by; else the scheduler's own metrics. Needs --max.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running answers get when it is stopped.")
    ] = 30.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs; else one for the port in the cache.")
    ] = None,
) -> None:
    """Serve a model on this machine: workers, scheduler and gateway, until Ctrl-C."""
    from ecoserve.local.display import Display, terminal
    from ecoserve.local.launcher import up as launch
    from ecoserve.local.options import Options

    display = Display(terminal())
    try:
        settings = _numbers("--policy-setting", policy_setting or [])
        thresholds, sizes = _numbers("--scaling", scaling or []), _sizes(macro)
        keys = _keys(api_key or [], api_keys)
        words = _words(engine_args)
    except ValueError as error:
        display.error(str(error))
        raise typer.Exit(1) from error
    options = Options(
        workers=workers,
        max_workers=max_workers,
        macro=sizes,
        scaling=thresholds,
        prometheus=prometheus,
        host=host,
        port=port,
        model=model,
        served_model_name=served_model_name,
        policy=policy,
        policy_settings=settings,
        ttft=ttft_slo,
        tpot=tpot_slo,
        late=late.value,
        queue_limit=queue_limit,
        api_keys=keys,
        body_limit=body_limit,
        debug=debug_mode,
        logs=logs,
        engine_args=words,
        compile=compile,
        relay=relay,
        drain_timeout=drain_timeout,
        run_dir=run_dir,
    )
    raise typer.Exit(launch(options, display))


def _numbers(option: str, pairs: list[str]) -> dict[str, float]:
    settings = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            settings[name] = float(value)
        except ValueError:
            raise ValueError(f"{option}: {pair!r} is not NAME=NUMBER") from None
    return settings


def _sizes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    lower, _, upper = text.partition(":")
    if not (lower.isdigit() and upper.isdigit()):
        raise ValueError(f"--macro: {text!r} is not N_l:N_u, such as 2:4")
    return int(lower), int(upper)


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    keys = list(given)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-keys: {file} cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-keys: {file} holds no key")
        keys += found
    return tuple(dict.fromkeys(keys))


def _words(arguments: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        raise ValueError(f"--engine-args: {error}") from error


app.command(short_help="Load an endpoint step by step, and find its goodput.")(bench)
sim.register(app)


def main() -> None:
    """Entry point of the `ecoserve` script."""
    sys.exit(app(prog_name="ecoserve"))
