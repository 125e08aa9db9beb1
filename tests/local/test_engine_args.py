"""Options of vLLM that are set elsewhere, by every spelling that vLLM takes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.engine_args import DATA, EVERYWHERE, TENSOR, Reserved, check

RESERVED = (Reserved(TENSOR, "set it there"), Reserved(DATA, "no"), *EVERYWHERE)


def refused(*arguments: str) -> str:
    with pytest.raises(ValueError, match="must not be given here") as error:
        check(arguments, RESERVED)
    return str(error.value)


def test_the_message_names_place_and_option_and_what_to_do() -> None:
    message = refused("--seed", "1", "--tensor_par", "2")
    assert message == (
        "[2]: --tensor-par (--tensor-parallel-size) must not be given here: set it there"
    )


@given(
    st.sampled_from([option for item in RESERVED for option in item.options]),
    st.booleans(),
    st.sampled_from(["", "=2", "=", ".key"]),
    st.integers(0, 30),
)
def test_every_spelling_is_refused(option: str, underscores: bool, after: str, cut: int) -> None:
    name = option
    if underscores and option.startswith("--"):
        name = "--" + option[2:].replace("-", "_")
    if not (after == ".key" and not option.startswith("--")):
        refused(name + after)
        (item,) = [item for item in RESERVED if option in item.options]
        assert re.search(item.pattern, name + after)
    least = 3 if option.startswith("--") else 2
    refused(name[: max(len(name) - cut, least)])


@pytest.mark.parametrize(
    "argument",
    ["", "-", "--", "2", "-1", "-0.5", "--seed", "tensor", "---tp", "--tensor-parallel-sizes"],
)
def test_others_are_not(argument: str) -> None:
    check([argument, f"{argument}x"], RESERVED)
