"""API keys: where they come from, what is taken, and that nothing shows them."""

import hmac
from pathlib import Path

import pytest

from cluster.api_keys import ApiKeys, read_api_keys
from cluster.config import ConfigError, load_config

KEYS = ("first-key", "second-key", "third-key")


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEYS", raising=False)


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_is_taken_as_bytes_and_text(key: str) -> None:
    keys = ApiKeys(KEYS)
    assert keys.accept(f"Bearer {key}")
    assert keys.accept(f"bearer  {key} ".encode())


@pytest.mark.parametrize(
    "given",
    [
        None, "", "Bearer", "Bearer ", "first-key", "Basic first-key", "Bearer first-ke", "Bearer first-key2",
        "Bearer FIRST-KEY", "Bearer first-key,second-key", "Bearer é", "Bearer \udcff", b"Bearer \xff",
    ],
)  # fmt: skip
def test_anything_else_is_refused(given: str | bytes | None) -> None:
    assert not ApiKeys(KEYS).accept(given)


def test_every_key_is_compared_with_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given in (*KEYS, "wrong"):
        compared.clear()
        ApiKeys(KEYS).accept(f"Bearer {given}")
        assert len(compared) == len(KEYS)
        assert {len(side) for pair in compared for side in pair} == {32}


def test_no_keys_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="nobody could come in"):
        ApiKeys(())


def test_keys_come_from_flags_and_the_file_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\n\n  from-file  \nsecond # is no comment\n")
    with pytest.raises(ConfigError, match=r"line 4 of .*keys is no key"):
        read_api_keys(load_config(None, {"api_keys_file": str(file)}))
    file.write_text("# who\n\n  from-file  \r\n#off\nsecond\n")
    config = load_config(None, {"api_key": ["from-flag"], "api_keys_file": str(file)})
    assert read_api_keys(config) == ("from-flag", "from-file", "second")


def test_environments_keys_are_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", "one, two,")
    assert read_api_keys(load_config()) == ("one", "two")
    assert read_api_keys(load_config(None, {"api_key": "mine"})) == ("mine",)


@pytest.mark.parametrize("value", ["", " ", " , "])
@pytest.mark.parametrize("flags", [{}, {"api_key": "mine"}])
def test_environments_keys_that_are_none_do_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, value: str, flags: dict[str, str]
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", value)
    with pytest.raises(ConfigError, match=r"^TANDEM_API_KEYS is set but holds no key, .*; unset it if everybody may"):
        load_config(None, flags)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no key"),
        (b"# none\n\n", "holds no key"),
        ("schlüssel\n".encode(), "line 1 of .* is no key"),
        (b"\xff\xfe\n", "is not UTF-8"),
    ],
)
def test_file_that_would_lock_everybody_out_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_keys_file: .*{problem}"):
        read_api_keys(load_config(None, {"api_keys_file": str(file)}))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_api_keys(load_config(None, {"api_keys_file": str(tmp_path / "missing")}))


@pytest.mark.parametrize("bad", [["sesame", 7], {"sesame": 1}, ["sesame open"], "sesame\n", [""], [["sesame"]], True])
def test_bad_key_is_told_without_itself(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"api_key": bad})
    assert set(caught.value.problems) == {
        "api_key: must be one key or a list of keys, each of visible ASCII without spaces"
    }
    assert "sesame" not in f"{caught.value!r} {caught.value.__cause__}"


def test_nothing_shows_a_key() -> None:
    config = load_config(None, {"api_key": ["sesame"]})
    shown = f"{config!r} {config} {config.model_dump()} {config.model_dump_json()} {ApiKeys(['sesame'])!r}"
    assert "sesame" not in shown
