"""vLLM's options that are not for a user's further engine arguments, for they are set elsewhere.

The last of two values wins in vLLM without a word. So an option that operator, launcher or worker
set themselves is refused among the user's arguments, with what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reserved:
    """Options (all spellings, dashes in their names) that are set elsewhere; ``instead`` is for
    whoever gives one of them."""

    options: tuple[str, ...]
    instead: str

    @property
    def pattern(self) -> str:
        """A regular expression for an argument that gives one of them, in full."""
        spelt = (
            option[:2] + option[2:].replace("-", "[-_]") if option.startswith("--") else option
            for option in self.options
        )
        return f"^({'|'.join(spelt)})([=.]|$)"


TENSOR = ("--tensor-parallel-size", "-tp")
PIPELINE = ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
MODEL = ("--model",)
SERVED_NAME = ("--served-model-name",)
PREFIX_CACHING = ("--enable-prefix-caching", "--no-enable-prefix-caching")
API_KEY = ("--api-key",)
END = ("--shutdown-timeout",)
SCHEDULER = ("--scheduler-cls",)

EVERYWHERE = (
    Reserved(
        ("--host", "--port", "--uds", "--grpc", "--headless", "--api-server-count", "-asc"),
        "a worker has EcoServe's own server, which has its own address",
    ),
    Reserved(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
        "a worker's TLS is EcoServe's own",
    ),
    Reserved(("--nnodes", "-n", "--node-rank", "-r"), "an instance is on one node"),
    Reserved(("--config",), "give its arguments themselves: nobody looks into a file of them"),
)


def check(arguments: Iterable[str], reserved: Iterable[Reserved]) -> None:
    """Raises ``ValueError`` for the first argument that gives a reserved option, by any spelling
    that vLLM takes: with underscores, with ``=``, abbreviated. The message begins with the
    argument's place, such as "[2]: "."""
    reserved = tuple(reserved)
    for place, argument in enumerate(arguments):
        name = _name(argument)
        for item in reserved:
            for option in item.options:
                if option == name or _abbreviates(name, option):
                    meant = name if name == option else f"{name} ({option})"
                    raise ValueError(f"[{place}]: {meant} must not be given here: {item.instead}")


def _name(argument: str) -> str:
    """The option that an argument names, as vLLM reads it; of ``--option.key`` the option."""
    name = argument.partition("=")[0]
    if name.startswith("--"):
        name = name.partition(".")[0].replace("_", "-")
    return name


def _abbreviates(name: str, option: str) -> bool:
    least = 3 if name.startswith("--") else 2
    return name.startswith("-") and len(name) >= least and option.startswith(name)
