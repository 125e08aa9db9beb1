"""Numbers that people give: no command takes one that is infinite, none at all, or absurd."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from ecoserve import numbers
from ecoserve.cli import app
from ecoserve.local import launcher
from ecoserve.numbers import Allowed

ABSURD = ("nan", "inf", "-inf", "-1", "1e300", "1" + "0" * 400)


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 1e6),
    st.booleans(),
    st.booleans(),
    st.floats() | st.integers(),
)
def test_all_ways_agree(low: float, width: float, above: bool, whole: bool, value: float) -> None:
    allowed = Allowed(low, low + width, above=above, whole=whole)
    expected = (
        (math.isfinite(value) if isinstance(value, float) else True)
        and (low < value if above else low <= value)
        and value <= low + width
    )
    if whole and expected:
        expected = value == math.floor(value)
    assert (value in allowed) == expected

    def takes(way: Callable[[], object], error: type[Exception]) -> bool:
        try:
            way()
        except error:
            return False
        return True

    assert takes(lambda: allowed.check("--x", value), ValueError) == expected
    assert takes(lambda: allowed.option(value), typer.BadParameter) == expected
    text = str(int(value)) if whole and expected else str(value)
    assert takes(lambda: allowed.argument(text), argparse.ArgumentTypeError) == expected


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (numbers.SECONDS, "a positive number of seconds, 86400 at most"),
        (numbers.WAIT, "a number of seconds from 0 to 86400"),
        (numbers.SHARE, "a number from 0 to 1"),
        (numbers.PORT, "a whole number from 1 to 65535"),
        (Allowed(2, above=True), "a number above 2"),
        (Allowed(0, above=True), "a positive number"),
    ],
)
def test_what_is_allowed_in_words(allowed: Allowed, words: str) -> None:
    assert str(allowed) == words
    with pytest.raises(ValueError, match=f"^--x must be {words}, not nan$"):
        allowed.check("--x", math.nan)
    with pytest.raises(ValueError, match=f"^must be {words}, not 'many'$"):
        allowed.read("many")


def _numeric(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The options of all commands that take numbers, behind the names of their commands."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _numeric(inner, (*path, name))
    for option in command.params:
        if option.type_descriptor.annotation in (int, float, list[int], list[float]):
            yield *path, option.opts[0]


def _begin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: a command that has taken its numbers fails."""

    def begun(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it began")

    monkeypatch.setattr(launcher, "_model", begun)
    monkeypatch.setattr("ecoserve.bench.command.bench", begun)
    for group in (COMMAND.commands["sim"].commands.values(), [COMMAND.commands["plan"]]):
        for command in group:
            monkeypatch.setattr(command, "callback", begun)


COMMAND: Any = get_command(app)
OPTIONS = list(_numeric(COMMAND))
# Numbers within a text.
WITHIN = [
    *(("bench", f"--{name}") for name in ("rate", "concurrency", "ttft-slo", "tpot-slo")),
    *(("up", "--scaling", f"{name}=") for name in ("expand.use_for", "contract.cooldown")),
    ("up", "--scaling", "expand.max_step="),
    ("up", "--macro", "1:"),
]


@pytest.mark.parametrize("option", [*OPTIONS, *WITHIN], ids=" ".join)
def test_a_number_that_cannot_be_is_told_with_its_option(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _begin_nothing(monkeypatch)
    at = next(n for n, word in enumerate(option) if word.startswith("--"))
    command, name, within = option[:at], option[at], "".join(option[at + 1 :])
    for text in ABSURD:
        with pytest.raises(SystemExit) as ended:
            COMMAND.main([*command, f"{name}={within}{text}"], prog_name="ecoserve")
        assert ended.value.code in (1, 2), text
        told = "".join(capsys.readouterr())
        assert name in told, (text, told)


def test_numeric_options_are_found() -> None:
    assert ("up", "--drain-timeout") in OPTIONS
    assert ("sim", "scale", "--rate") in OPTIONS
    assert ("plan", "--gpus") in OPTIONS


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("ecoserve.scheduler.__main__", "main"),
        ("ecoserve.gateway.__main__", "main"),
        ("ecoserve.relay.__main__", "main"),
        ("ecoserve_worker.options", "parse"),
        ("ecoserve_operator.__main__", "parse"),
    ],
)
def test_processes_have_no_number_that_is_not_checked(
    module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parsed(Exception):
        pass

    parsers: list[argparse.ArgumentParser] = []

    def parse_args(self: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(self)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", ["x"])
    call = getattr(importlib.import_module(module), function)
    with pytest.raises(Parsed):
        call(*([[]] if function == "parse" else []))
    for action in parsers[0]._actions:
        assert action.type not in (int, float), action.option_strings
        if isinstance(getattr(action.type, "__self__", None), Allowed):
            for text in ABSURD:
                with pytest.raises(argparse.ArgumentTypeError, match="must be a "):
                    action.type(text)  # type: ignore[operator]
