"""The commands that are clients, of a server that wants a key and has a certificate."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from certificates import Authority
from cluster.cli.api_client import ApiClient, ServerError, trust_only
from cluster.cli.app import app
from scripted_server import ScriptedServer, scripted_server

KEY = "sesame"
COMMANDS = {
    "chat": ("chat", "Capital of France?"),
    "bench": ("bench", "--num-prompts", "2", "--input-len", "4", "--output-len", "3"),
    "status": ("status",),
}
command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANDEM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def server(authority: Authority) -> Iterator[ScriptedServer]:
    with scripted_server(api_key=KEY, tls_files=authority.sign("127.0.0.1")) as scripted:
        scripted.metrics = ""
        yield scripted


def run(server: ScriptedServer, command: str, *args: str, **environment: str) -> Result:
    name, *rest = COMMANDS[command]
    return CliRunner().invoke(app, [name, "--base-url", server.base_url, *rest, *args], env=environment)


@command
def test_key_comes_from_the_flag_or_the_environment(server: ScriptedServer, authority: Authority, command: str) -> None:
    trusting = ("--ca-file", authority.file)
    for result in (
        run(server, command, *trusting, "--api-key", KEY),
        run(server, command, *trusting, TANDEM_API_KEY=KEY),
        run(server, command, *trusting, OPENAI_API_KEY=KEY),
        run(server, command, *trusting, TANDEM_API_KEY=KEY, OPENAI_API_KEY="of another server"),
    ):
        assert result.exit_code == 0, result.output
        assert KEY not in result.output


@command
def test_refusal_of_a_key_is_one_sentence_without_it(
    server: ScriptedServer, authority: Authority, command: str
) -> None:
    result = run(server, command, "--ca-file", authority.file, "--api-key", "wrong-one")
    assert result.exit_code == 1
    assert "API key" in result.stderr
    assert "Traceback" not in result.output
    assert "wrong-one" not in result.output


@command
def test_certificate_that_is_not_trusted_is_one_sentence(
    server: ScriptedServer, authority: Authority, command: str
) -> None:
    result = run(server, command, "--api-key", KEY)
    assert result.exit_code == 1
    assert result.stderr == (
        f"tandem: the certificate of {server.base_url} is not trusted: unable to get local issuer certificate; "
        "--ca-file names who is\n"
    )


@command
def test_bad_file_of_authorities_is_named(server: ScriptedServer, tmp_path: Path, command: str) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    result = run(server, command, "--ca-file", str(missing))
    assert (result.exit_code, result.stderr) == (
        1,
        f"tandem: {missing} cannot be read: No such file or directory\n",
    )
    result = run(server, command, "--ca-file", str(empty))
    assert (result.exit_code, result.stderr) == (1, f"tandem: {empty} holds no certificates in PEM\n")


async def test_server_that_must_have_one_very_certificate_is_believed_whatever_it_is_called(
    authority: Authority,
) -> None:
    files, others = authority.sign("gateway.example"), authority.sign("another.example")
    with scripted_server(tls_files=files) as server:
        async with ApiClient(server.base_url, tls=trust_only(files[0])) as client:
            assert await client.model() == "scripted"
        async with ApiClient(server.base_url, tls=trust_only(others[0])) as client:
            with pytest.raises(ServerError, match="is not trusted"):
                await client.model()
