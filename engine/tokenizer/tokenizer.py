"""A model's tokenizer: text to token ids, and token ids to bytes and text.

It is loaded from where the model's weights lie: a Hugging Face folder (`tokenizer.json` and its neighbours) or the
metadata of one GGUF file. Encoding is the `tokenizers` library's; decoding is ours, by the bytes of each token, so that
a stream of tokens and the whole of them give the same text by construction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from engine.tokenizer.token_bytes import byte_level_bytes, sentencepiece_bytes, token_bytes_table


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a model's files say about its special tokens."""

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # any of them ends a text: end of sequence, end of turn
    names: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, …: what a chat template may use


class Tokenizer:
    """Encodes and decodes for one model; immutable, so threads may share it.

    Raises:
        ValueError: the vocabulary spells bytes in a way that is not known here.
    """

    def __init__(
        self, encoder: tokenizers.Tokenizer, special: SpecialTokens, chat_template: str | None = None, name: str = ""
    ) -> None:
        self._encoder = encoder
        self.special = special
        self.chat_template = chat_template
        self.name = name
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        self._tokens = tokens
        decoder = repr(encoder.decoder)
        is_sentencepiece = "\N{LOWER ONE EIGHTH BLOCK}" in decoder
        if not is_sentencepiece and "ByteLevel" not in decoder:
            raise ValueError(
                f"the tokenizer of {name or 'this model'} decodes by {decoder}; byte-level and SentencePiece "
                "vocabularies are supported"
            )
        # Most SentencePiece models put a space before every text; it belongs to the spelling, not to the text.
        self._strips_space = "Strip(" in decoder or ("Metaspace" in decoder and "never" not in decoder)
        spell = sentencepiece_bytes if is_sentencepiece else byte_level_bytes
        self._bytes = token_bytes_table(tokens, spell)
        self.special_token_ids = frozenset(
            token_id for token_id, token in encoder.get_added_tokens_decoder().items() if token.special
        )
        self.max_token_bytes = max(map(len, self._bytes), default=1)

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Of the model at `path`: a Hugging Face folder, or one GGUF file.

        Raises:
            FileNotFoundError: a folder without tokenizer.json.
            ModelLoadError: a damaged GGUF file.
            ValueError: a tokenizer of a kind that is not known here, or a damaged file.
        """
        if path.is_dir():
            from engine.tokenizer.folder_tokenizer import load_folder_tokenizer

            return load_folder_tokenizer(path)
        from engine.tokenizer.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token id that has a token."""
        return len(self._tokens)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.special.eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Special tokens written out in it are recognised as such.

        Lets other threads run meanwhile.

        Raises:
            ValueError: `text` holds a lone surrogate, which no encoding of Unicode can express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise ValueError(f"there is a lone surrogate at character {exc.start}") from exc
        # The batch call is the one that gives up the interpreter lock.
        (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        skip = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skip)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; nothing, for an id beyond the vocabulary (models pad their embeddings)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """A token for people: its bytes as text, with U+FFFD where they are only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        token_id: int | None = self._encoder.token_to_id(token)
        return token_id

    def raw_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [(self._tokens[i] if 0 <= i < len(self._tokens) else None) or "" for i in token_ids]
