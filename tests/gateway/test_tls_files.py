"""Certificates from files: what is taken over, and what is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ecoserve import tls
from tests.gateway.mounted import Secret
from tests.gateway.secure_world import authority, files

CA = authority()


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    found = Secret(tmp_path / "secret")
    found.write(files(CA, "worker"))
    return found


def test_what_has_not_changed_is_the_same(secret: Secret) -> None:
    found = tls.Files(secret.folder)
    assert found.current() is found.current()


def test_changes_are_taken_over(secret: Secret) -> None:
    found = tls.Files(secret.folder)
    before, new = found.current(), files(CA, "worker")
    secret.write(new)
    assert found.current() is not before
    assert found.current().certificate.decode() == new[tls.CERTIFICATE]
    assert found.current().key.decode() == new[tls.KEY]


def test_what_cannot_be_used_is_not_taken_over_and_told_once(
    secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    found = tls.Files(secret.folder)
    before, good = found.current(), files(CA, "worker")
    for bad in (
        {**good, tls.KEY: files(CA, "worker")[tls.KEY]},
        {**good, tls.CERTIFICATE: "x"},
        {**good, tls.CA: ""},
    ):
        secret.write(bad)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert found.current() is before
            assert found.current() is before
        (told,) = caplog.messages
        assert str(secret.folder) in told
    secret.write(good)
    assert found.current().certificate.decode() == good[tls.CERTIFICATE]


def test_the_first_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(tls.Unusable, match="nowhere"):
        tls.Files(tmp_path / "nowhere")


def test_files_that_go_while_they_are_read_are_of_no_use(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, taken = Path.read_bytes, secret.folder / tls.CA

    def reads(path: Path) -> bytes:
        text = read(path)
        if path == taken:
            path.unlink()
        return text

    monkeypatch.setattr(Path, "read_bytes", reads)
    with pytest.raises(tls.Unusable, match="secret"):
        tls.Files(secret.folder)


def test_files_that_are_written_one_after_the_other_are_taken_over_as_a_pair(
    tmp_path: Path,
) -> None:
    """Not as the kubelet does it: by who copies them into the folder, a half at a time."""
    old, new = files(CA, "worker"), files(CA, "worker")
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    found = tls.Files(tmp_path)
    before = found.current()
    for name, half in ((tls.CERTIFICATE, 300), (tls.CERTIFICATE, None), (tls.KEY, 100)):
        (tmp_path / name).write_text(new[name][:half])
        assert found.current() is before
    (tmp_path / tls.KEY).write_text(new[tls.KEY])
    assert found.current().certificate.decode() == new[tls.CERTIFICATE]
    assert found.current().key.decode() == new[tls.KEY]


def test_who_is_trusted_is_in_a_file_of_its_own(secret: Secret) -> None:
    other = authority()
    secret.write({**files(CA, "worker"), tls.SCHEDULER_CA: other.roots})
    assert tls.Files(secret.folder, tls.SCHEDULER_CA).current().ca.decode() == other.roots
    assert tls.Files(secret.folder).current().ca.decode() == CA.roots
