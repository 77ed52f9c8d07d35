"""The API keys that clients present: `Authorization: Bearer <key>`, over HTTP and gRPC alike.

Keys are kept as digests, so that nothing that is printed, logged or dumped can show one, and compared in constant time:
how long a refusal takes tells nothing of a key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from cluster.config import ClusterConfig, ConfigError
from cluster.config_fields import is_sound_key

_SCHEME = "bearer"
REFUSAL = "Incorrect API key: this server wants one it knows, as 'Authorization: Bearer <key>'."


class ApiKeys:
    """The keys that are taken. Its repr says how many.

    Args:
        keys: at least one.
    """

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str]) -> None:
        # Of one length, whatever the keys' are; each once, in an order that says nothing.
        self._digests = tuple(sorted({_digest(key.encode()) for key in keys}))
        if not self._digests:
            raise ValueError("without any key nobody could come in")

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._digests)})"

    def accept(self, authorization: str | bytes | None) -> bool:
        """Whether the value of an Authorization header holds one of the keys.

        Every key is compared with, whichever fits.
        """
        if isinstance(authorization, str):
            authorization = authorization.encode("utf-8", "surrogateescape")
        scheme, _, credentials = (authorization or b"").partition(b" ")
        given, found = _digest(credentials.strip(b" ")), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == _SCHEME.encode()


def read_api_keys(config: ClusterConfig) -> tuple[str, ...]:
    """All keys of a configuration: its own, and those of its file. None: everybody may come in.

    Raises:
        ConfigError: the file cannot be read, or holds no key, or one that no client could send.
    """
    keys = [key.get_secret_value() for key in config.api_key]
    if config.api_keys_file is not None:
        keys += _keys_of_file(Path(config.api_keys_file))
    return tuple(keys)


def _keys_of_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise ConfigError(f"api_keys_file: {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError:
        # Without its cause, whose words hold a piece of the file.
        raise ConfigError(f"api_keys_file: {path} is not UTF-8 text") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_sound_key(key):
            raise ConfigError(
                f"api_keys_file: line {number} of {path} is no key: a key is visible ASCII without spaces"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"api_keys_file: {path} holds no key: nobody could come in")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
