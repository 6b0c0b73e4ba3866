"""Https that cannot be had is refused before a model is loaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.server.run import check_tls
from tests.server.test_replica_parts import refused


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    check_tls(None, None)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense", "ascii")
    for path in (tmp_path / "nothing", nonsense, tmp_path):
        with pytest.raises(InvalidParameterError, match="PEM files") as found:
            check_tls(path, None)
        assert (found.value.field, found.value.value) == ("ssl_certfile", str(path))
    with pytest.raises(ContradictionError, match="--ssl-certfile"):
        check_tls(None, nonsense)


def test_nobody_is_asked_for_the_password_of_a_key(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:word", "-subj", "/CN=x")
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with pytest.raises(InvalidParameterError, match="the key is encrypted"):
        check_tls(certificate, key)


@pytest.mark.parametrize("options", [("--ssl-certfile", "nothing"), ("--ssl-keyfile", "nothing")])
def test_the_command_refuses_them(options: tuple[str, str]) -> None:
    error = refused("no-such-model", "--port", "0", *options)
    assert isinstance(error, InvalidParameterError | ContradictionError)
    assert error.field == options[0].removeprefix("--").replace("-", "_")
