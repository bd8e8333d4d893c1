"""Corpus -> tokenizer + token shards.

    python -m scripts.demo.prepare_corpus CORPUS_DIR --out DATA_DIR

reads every `<name>.jsonl.xz` listed in `sources.py`, trains a byte-level BPE on a balanced sample, and writes to
DATA_DIR: `tokenizer.json`, `tokenizer_config.json`, one `<name>.{train,val}.u16.xz` per source (documents in random
order, each followed by `<|endoftext|>`) and `corpus.json` (counts, licences). About 1 % of the documents of each
source is held out, chosen by a hash of the text (of the question where a document starts with one).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo.sources import SOURCES, Source, read_attributions

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Words with one leading character, single digits, punctuation, newlines with the blanks before them, and runs of
# blanks up to the one that belongs to the next word: an indentation is one token.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CUT_DOMAINS = (
    "stories",
    "speeches",
)  # whose long documents are cut at blank lines, to have enough to hold out
LONG_DOCUMENT = 16_384  # characters; what is longer is cut into parts of about half of this
CONTEXT = 2048


def unit_hash(text: str, salt: str) -> float:
    """A reproducible number in [0, 1) for a text."""
    digest = hashlib.sha256(f"{salt}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def hold_out(documents: list[str], fraction: float) -> list[bool]:
    """Which documents belong to validation, at least one; documents that share their question go the same way."""

    def place(text: str) -> float:
        first_line = text.split("\n", 1)[0]
        key = first_line if text.startswith(("Question:", "Problem:")) else text
        return unit_hash(re.sub(r"\W+", " ", key), "held out")

    places = [place(text) for text in documents]
    limit = max(fraction, min(places))
    return [value <= limit for value in places]


def split_long(text: str) -> Iterator[str]:
    """A document, or its parts where it is long."""
    if len(text) <= LONG_DOCUMENT:
        yield text
        return
    part: list[str] = []
    size = 0
    for paragraph in re.split(r"(?<=\n\n)", text):
        part.append(paragraph)
        size += len(paragraph)
        if size >= LONG_DOCUMENT // 2:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)


def chat(turns: list[tuple[str, str]]) -> str:
    """Turns as ChatML, as the tokenizer's chat template renders them."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def as_chat(source: Source, text: str) -> str:
    """Some of the question-and-answer documents, rewritten with the chat tokens; any other text unchanged."""
    if source.domain == "math":
        match = re.fullmatch(r"(?:Question|Problem): (.*?)\n(?:Answer|Solution): (.*)", text, re.DOTALL)
        if match and unit_hash(text, "chat") < 0.25:
            return chat([("user", match[1].strip()), ("assistant", match[2].strip())])
    elif source.name == "mbpp":
        match = re.fullmatch(r"# ([^\n]+)\n(.*)", text, re.DOTALL)
        if match and unit_hash(text, "chat") < 0.4:
            return chat([("user", match[1]), ("assistant", f"```python\n{match[2].strip()}\n```")])
    elif source.domain == "dialogue" and unit_hash(text, "chat") < 0.5:
        parts = re.split(r"(?:^|\n)(User|Assistant): ", text)
        if len(parts) >= 5 and not parts[0]:
            roles, contents = [part.lower() for part in parts[1::2]], parts[2::2]
            return chat(list(zip(roles, contents, strict=True)))
    return text


def read_documents(corpus: Path, source: Source) -> list[str]:
    """The documents of a source in a reproducible random order."""
    with lzma.open(corpus / f"{source.name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    if source.domain in CUT_DOMAINS:
        documents = [part for text in documents for part in split_long(text)]
    documents = [text for text in documents if text.strip()]
    random.Random(source.name).shuffle(documents)
    return documents


def balanced_sample(documents: list[str], limit: int) -> Iterator[str]:
    """Documents until `limit` bytes are reached."""
    size = 0
    for text in documents:
        yield text
        size += len(text.encode())
        if size >= limit:
            return


def train_tokenizer(samples: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that gives back any UTF-8 text unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the sample gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """`tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }


def encode(tokenizer: Tokenizer, documents: list[str], batch: int = 256) -> np.ndarray:
    """Documents joined by `<|endoftext|>`, which also comes first and last."""
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    pieces = [np.array([end], np.uint16)]
    for start in range(0, len(documents), batch):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + batch]):
            pieces.append(np.array([*encoding.ids, end], np.uint16))
    return np.concatenate(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory with <name>.jsonl.xz and README.md")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=6144)
    parser.add_argument("--sample-bytes", type=int, default=1_500_000, help="of each source, for the tokenizer")
    parser.add_argument("--held-out", type=float, default=0.012, help="fraction of documents")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    documents = {source.name: read_documents(args.corpus, source) for source in SOURCES}
    held_out = {name: hold_out(texts, args.held_out) for name, texts in documents.items()}
    training = {
        source.name: [
            as_chat(source, text)
            for text, held in zip(documents[source.name], held_out[source.name], strict=True)
            if not held
        ]
        for source in SOURCES
    }
    samples = (text for name in training for text in balanced_sample(training[name], args.sample_bytes))
    tokenizer = train_tokenizer(samples, args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")

    attributions = read_attributions(args.corpus / "README.md")
    report = []
    for source in SOURCES:
        # Validation text stays as the source has it: bits per byte are those of the text, not of a rewriting.
        texts = documents[source.name]
        validation = [text for text, held in zip(texts, held_out[source.name], strict=True) if held]
        row: dict[str, object] = {**asdict(source), **asdict(attributions[source.name])}
        for part, chosen in (("train", training[source.name]), ("val", validation)):
            tokens = encode(tokenizer, chosen)
            with lzma.open(args.out / f"{source.name}.{part}.u16.xz", "wb", preset=3) as file:
                file.write(tokens.tobytes())
            row[f"{part}_documents"] = len(chosen)
            row[f"{part}_tokens"] = len(tokens)
            row[f"{part}_bytes"] = sum(len(text.encode()) for text in chosen)
        report.append(row)
        print(f"{source.name:26s} {row['train_tokens']:>10} train {row['val_tokens']:>8} val tokens", flush=True)
    (args.out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    total = sum(int(str(row["train_tokens"])) for row in report)
    size = sum(int(str(row["train_bytes"])) for row in report)
    print(f"{total} training tokens, {size / total:.2f} bytes per token")


if __name__ == "__main__":
    main()
