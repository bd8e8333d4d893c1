"""Between text and token ids: tokenizers, conversations, generation defaults, text as it is decided."""

from seqmoe_jax.text.chat import Chat, chat_of
from seqmoe_jax.text.defaults import eos_token_ids, model_sampling
from seqmoe_jax.text.given import TokenIds, tokenizer_of
from seqmoe_jax.text.stream import TextStream
from seqmoe_jax.text.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, encode_prompt, open_tokenizer

__all__ = [
    "ByteTokenizer", "Chat", "FileTokenizer", "TextStream", "TokenIds", "Tokenizer", "chat_of", "encode_prompt",
    "eos_token_ids", "model_sampling", "open_tokenizer", "tokenizer_of",
]  # fmt: skip
