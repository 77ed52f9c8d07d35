"""The tokenizer that a GGUF file carries in its metadata.

Two kinds: `gpt2` is byte-level BPE with a list of merges, and with a rule for cutting text before it (`pre`); `llama`
is SentencePiece BPE, whose merges follow from the scores of its pieces. The rules are llama.cpp's, which the people
who write these files test against.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from tokenizers.processors import TemplateProcessing

from engine.model.gguf_file import GGUFFile
from engine.tokenizer.tokenizer import SpecialTokens, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_SPACE_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"

# How Llama 3 and Qwen 2 cut text into words; they differ in how many digits make one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_cut() -> pre_tokenizers.PreTokenizer:
    # Every digit is a word of its own; the space before a number is therefore one as well.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_cut()])


def _byte_level(metadata: Mapping[str, Any]) -> Encoder:
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if cut in ("llama-bpe", "llama3", "llama-v3"):
        pre_tokenizer, ignore_merges, normalizer = _cut_by(_WORDS % "1,3"), True, None
    elif cut == "qwen2":
        pre_tokenizer, ignore_merges, normalizer = _cut_by(_WORDS % "1"), False, normalizers.NFC()
    elif cut == "smollm":
        pre_tokenizer, ignore_merges, normalizer = _smollm_cut(), False, None
    elif cut == "gpt-2":
        pre_tokenizer, ignore_merges, normalizer = _gpt2_cut(), False, None
    else:
        raise ValueError(
            f"tokenizer.ggml.pre is {cut!r}; supported for GGUF files are smollm, gpt-2, llama-bpe and qwen2 "
            "(a Hugging Face folder of the same model brings its own rule)"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    try:
        encoder = Encoder(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    except Exception as exc:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.ggml.merges does not fit the vocabulary: {exc}") from exc
    if normalizer is not None:
        encoder.normalizer = normalizer
    encoder.pre_tokenizer = pre_tokenizer
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Encoder:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    merges = sentencepiece_merges(tokens, metadata["tokenizer.ggml.scores"], kinds)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    encoder = Encoder(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    spelling: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE_PIECE)]
    stripping: list[decoders.Decoder] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spelling.insert(0, normalizers.Prepend(_SPACE_PIECE))
        stripping.append(decoders.Strip(content=" ", left=1, right=0))
    encoder.normalizer = normalizers.Sequence(spelling)
    encoder.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_PIECE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripping]
    )
    return encoder


def sentencepiece_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that amount to SentencePiece's rule: of all neighbours, join those whose joint piece scores best."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] == _NORMAL}
    by_score = sorted(ids, key=lambda token: (-scores[ids[token]], ids[token]))
    return [
        (token[:cut], token[cut:])
        for token in by_score
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """From the file's metadata.

    Raises:
        ModelLoadError: no GGUF file, or a damaged one.
        ValueError: one without a vocabulary, or with a kind of tokenizer that is not known here.
    """
    with GGUFFile(path) as file:
        metadata = file.metadata
    try:
        return _from_metadata(metadata, path.name)
    except KeyError as exc:
        raise ValueError(f"{path.name} lacks {exc.args[0]}: it carries no complete tokenizer") from exc


def _from_metadata(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        encoder = _byte_level(metadata)
        begins_with_bos = metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    elif kind == "llama":
        encoder = _sentencepiece(metadata)
        begins_with_bos = True
    else:
        raise ValueError(f"{name} has a tokenizer of kind {kind!r}; supported are gpt2 (byte-level BPE) and llama")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    encoder.add_tokens(added)

    def special(key: str) -> int | None:
        token_id: int | None = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return token_id if token_id is not None and token_id < len(tokens) else None

    bos, eos = special("bos"), special("eos")
    frame = ["$A"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos):
        frame.insert(0, tokens[bos])
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        frame.append(tokens[eos])
    if len(frame) > 1:
        ids = [(tokens[i], i) for i in (bos, eos) if i is not None]
        encoder.post_processor = TemplateProcessing(single=frame, special_tokens=ids)
    names = {"bos": bos, "eos": eos, "unk": special("unknown"), "pad": special("padding")}
    return Tokenizer(
        encoder,
        SpecialTokens(
            bos_token_id=bos,
            eos_token_ids=frozenset(i for i in (eos, special("eot")) if i is not None),
            names={f"{key}_token": tokens[token_id] for key, token_id in names.items() if token_id is not None},
        ),
        chat_template=metadata.get("tokenizer.chat_template"),
        name=name,
    )
