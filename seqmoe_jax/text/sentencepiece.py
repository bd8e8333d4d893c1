"""sentencepiece's `tokenizer.model` (Mixtral and others of that time), as transformers 5 reads it.

It takes the pieces and their kinds from the file and has the rest in its own terms, so this is not what sentencepiece
itself makes of a text: there is no space before the first word unless the class is `LlamaTokenizer`, and special tokens
inside a text are those tokens. Reference: `convert_slow_tokenizer.SentencePieceExtractor` and
`SpmConverter.build_tokenizer_from_spm_proto`. Needs the packages `sentencepiece` and `protobuf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.text.side_tokens import SideTokens, add_to, read_side_tokens
from seqmoe_jax.text.tokenizer_files import check_flags, import_package, read_if_there, reading
from seqmoe_jax.text.tokenizer_kinds import kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNIGRAM, _CONTROL, _USER_DEFINED = 1, 3, 4  # of sentencepiece_model.proto: a model_type, and types of pieces
_SPACE = "\u2581"


def tokenizer_of_pieces(directory: Path, family: str) -> Tokenizer:
    """The `tokenizer.model` of a directory with what stands beside it.

    Raises `CheckpointError` where it is damaged, `ConfigError` where it cannot be used.
    """
    import tokenizers

    path = directory / "tokenizer.model"
    messages = import_package("sentencepiece.sentencepiece_model_pb2", path)
    config = read_if_there(directory / "tokenizer_config.json")
    kind = kind_of(directory, family)
    if kind is not None and not kind.pieces:
        raise ConfigError(f"{path}: {family} is not known to use sentencepiece; copy the model's tokenizer.json there")
    with reading(path):
        proto = messages.ModelProto()
        proto.ParseFromString(path.read_bytes())
        if not proto.pieces:
            raise ValueError("a file without pieces")
    trained = proto.trainer_spec
    bpe = kind is not None or trained.model_type != _UNIGRAM
    check_flags(config, str(directory / "tokenizer_config.json"), bpe=bpe)
    named = {"bos_token": (trained.bos_id, trained.bos_piece), "eos_token": (trained.eos_id, trained.eos_piece),
             "unk_token": (trained.unk_id, trained.unk_piece)}  # fmt: skip
    own = {name: piece for name, (token, piece) in named.items() if token >= 0}
    tokens = read_side_tokens(directory, defaults=own if kind is None else kind.defaults)
    with reading(path):
        if kind is None:
            tokenizer = _generic(proto, tokens)
        else:
            tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(*_merged(proto)))
            kind.rebuild(tokenizer, config)
    if not tokens.extra:
        special = [p for p in proto.pieces if p.type in (_CONTROL, _USER_DEFINED)]
        made = (tokenizers.AddedToken(p.piece, normalized=False, special=p.type == _CONTROL) for p in special)
        tokens = replace(tokens, extra=tuple(made))
    add_to(tokenizer, tokens)
    _add_ends(tokenizer, tokens, config)
    return tokenizer


def _generic(proto: Any, tokens: SideTokens) -> Tokenizer:
    """What the file itself says, for models that have no class of their own."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    trained, charsmap = proto.trainer_spec, proto.normalizer_spec.precompiled_charsmap
    if trained.model_type == _UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback))
    else:
        vocab, merges = _merged(proto)
        vocab = _renamed(vocab, {at: token.content for at, token in tokens.added.items()})
        tokenizer = Tokenizer(
            models.BPE(vocab, merges, unk_token=trained.unk_piece, fuse_unk=True, byte_fallback=trained.byte_fallback)
        )
    first = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    bytes_too = [decoders.ByteFallback(), decoders.Fuse()] if trained.byte_fallback else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *bytes_too])
    return tokenizer


def _merged(proto: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids of the pieces, and every way to make one of two others: in the order of what they make."""
    vocab = {piece.piece: token for token, piece in enumerate(proto.pieces)}
    by_id = sorted(vocab, key=lambda piece: vocab[piece])
    merges = [
        (piece[:at], piece[at:])
        for piece in by_id for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab
    ]  # fmt: skip
    return vocab, merges


def _renamed(vocab: dict[str, int], names: Mapping[int, str]) -> dict[str, int]:
    """Pieces that hold a place get the name that `added_tokens_decoder` has for it."""
    pieces = {token: piece for piece, token in vocab.items()}
    for token, name in names.items():
        if token in pieces and name not in vocab:
            vocab[name] = vocab.pop(pieces[token])
    return vocab


def _add_ends(tokenizer: Tokenizer, tokens: SideTokens, config: Mapping[str, Any]) -> None:
    """`add_bos_token` and `add_eos_token`, both off where they are not given."""
    from tokenizers import processors

    text = {name: str(getattr(token, "content", token)) for name, token in tokens.named.items()}
    first, last = (
        text[f"{end}_token"] if config.get(f"add_{end}_token") and f"{end}_token" in text else None
        for end in ("bos", "eos")
    )
    template = " ".join([*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])])
    ends = {name: tokenizer.token_to_id(name) for name in (first, last) if name}
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*ends.items()])
