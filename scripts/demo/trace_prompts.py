"""Corpus -> prompts for a trace of the demo model: beginnings of documents, some greedy, some to be sampled from.

    python -m scripts.demo.trace_prompts CORPUS_DIR --out scripts/demo/trace_prompts.jsonl

Split `train` begins documents that the demo was trained on, split `test` such as were held out of its training
(`prepare_corpus.hold_out`), the same number from every source where it has them. The order is random, so that every
part of the file is a fair sample. The sources and their licences: the demo's card.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from scripts.demo.prepare_corpus import as_chat, hold_out, read_documents
from scripts.demo.sources import SOURCES

HELD_OUT = 0.012  # as the shipped demo was trained
SHORTEST, LONGEST = 8, 96  # tokens of a prompt
GREEDY = 0.25  # share of greedy sequences
TEMPERATURE = 0.8
ASSISTANT = "<|im_start|>assistant\n"


def beginning(text: str, tokenizer: Tokenizer, chance: random.Random) -> str | None:
    """A document's first tokens; of a dialogue, everything up to the first answer. None where it is too short."""
    if ASSISTANT in text:
        prompt = text[: text.index(ASSISTANT) + len(ASSISTANT)]
        return prompt if len(tokenizer.encode(prompt).ids) <= 2 * LONGEST else None
    tokens = tokenizer.encode(text[: 8 * LONGEST]).ids
    size = chance.randint(SHORTEST, LONGEST)
    if len(tokens) < 2 * SHORTEST:
        return None
    prompt = tokenizer.decode(tokens[: min(size, len(tokens) // 2)], skip_special_tokens=False)
    return None if "\ufffd" in prompt else prompt


def draw(corpus: Path, tokenizer: Tokenizer, train: int, test: int) -> list[dict[str, object]]:
    """Up to `train` and `test` prompts of every source."""
    rows: list[dict[str, object]] = []
    for source in SOURCES:
        chance = random.Random(f"trace {source.name}")
        documents = read_documents(corpus, source)
        held = hold_out(documents, HELD_OUT)
        for split, count in (("train", train), ("test", test)):
            texts = [
                as_chat(source, text) for text, out in zip(documents, held, strict=True) if out == (split == "test")
            ]
            prompts = (beginning(text, tokenizer, chance) for text in texts)
            chosen = [prompt for prompt, _ in zip((p for p in prompts if p), range(count), strict=False)]
            for prompt in chosen:
                temperature = 0.0 if chance.random() < GREEDY else TEMPERATURE
                rows.append({"prompt": prompt, "split": split, "temperature": temperature})
    random.Random(0).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory with <name>.jsonl.xz and README.md")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("seqmoe_jax/demo/tokenizer.json"))
    parser.add_argument("--train", type=int, default=16, help="prompts of every source (default: 16)")
    parser.add_argument("--test", type=int, default=3, help="prompts of every source (default: 3)")
    args = parser.parse_args()
    rows = draw(args.corpus, Tokenizer.from_file(str(args.tokenizer)), args.train, args.test)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    counts = {split: sum(row["split"] == split for row in rows) for split in ("train", "test")}
    print(f"{args.out}: {counts['train']} prompts for training, {counts['test']} for testing")


if __name__ == "__main__":
    main()
