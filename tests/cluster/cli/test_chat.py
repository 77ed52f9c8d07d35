"""`tandem chat`, against a scripted server."""

from typing import Any

from typer.testing import CliRunner, Result

from cluster.cli.app import app


def chat(server: Any, *args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", "--base-url", server.base_url, *args], input=stdin)


def test_one_question_prints_its_answer_and_nothing_else(server: Any) -> None:
    result = chat(server, "Capital of France?", "--temperature", "0", "--max-tokens", "9", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (0, "The capital is Paris.\n")
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("scripted", 0.0, 9)
    assert request["stream"] is True
    assert "top_p" not in request


def test_conversation_sends_all_turns_until_it_is_told_to_forget(server: Any) -> None:
    server.pieces = ["Yes."]
    result = chat(server, stdin="One?\n\nTwo?\n/new\nThree?\n")
    assert result.exit_code == 0, result.output
    assert [[turn["content"] for turn in request["messages"]] for request in server.requests] == [
        ["One?"],
        ["One?", "Yes.", "Two?"],
        ["Three?"],
    ]


def test_refusal_of_the_server_is_one_sentence(server: Any) -> None:
    server.error = (400, "max_tokens must be at least 1, not 0")
    result = chat(server, "Hello?")
    assert result.exit_code == 1
    assert result.stderr == f"tandem: {server.base_url} answered 400: max_tokens must be at least 1, not 0\n"
    assert "Traceback" not in result.output


def test_answer_that_breaks_off_is_an_error_after_what_came(server: Any) -> None:
    server.breaks_after = 1
    result = chat(server, "Hello?")
    assert result.exit_code == 1
    assert result.stdout == "The capital"
    assert result.stderr == "tandem: the server ended its answer in the middle\n"


def test_server_that_is_not_there_is_one_sentence(nobody: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--base-url", f"{nobody}/v1", "Hello?"])
    assert (result.exit_code, result.stderr) == (
        1,
        f"tandem: nothing answers at {nobody}; is a server running there?\n",
    )


def test_address_that_is_none_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["chat", "--base-url", "localhost", "Hello?"])
    assert (result.exit_code, result.stderr) == (1, "tandem: 'localhost' is not an http:// or https:// address\n")
