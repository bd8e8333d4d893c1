"""Every field of a request that is known. docs/serving.md prints this table.

The names are those of OpenAI's API reference (chat and completions), of vLLM's extra parameters, of llama.cpp's server,
and some that other servers have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seqmoe_jax.serving import kinds
from seqmoe_jax.serving.kinds import Endpoint, Field, Kind

RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "tokenize", "return_dict", "return_tensors", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
        "cls_token", "mask_token",
    }
)  # what a template is given by the server  # fmt: skip


def _applied(name: str, kind: Kind, says: str, endpoint: Endpoint = "both") -> Field:
    return Field(name=name, does="applied", kind=kind, says=says, endpoint=endpoint)


def _accepted(names: str, why: str) -> Iterator[Field]:
    return (Field(name=name, does="accepted", says=why) for name in names.split())


def _refused(neutral: Mapping[str, tuple[Any, ...]] | str, says: str, endpoint: Endpoint = "both") -> Iterator[Field]:
    each = dict.fromkeys(neutral.split(), ()) if isinstance(neutral, str) else neutral
    return (
        Field(name=name, does="refused", neutral=values, says=says, endpoint=endpoint) for name, values in each.items()
    )


_NEW = kinds.integer(1, 2**31 - 1)
_PENALTIES = "only the model's own probabilities are drawn from, there are no penalties"
_SAMPLERS = "of samplers there are temperature, top_k, top_p and min_p"
_FORMS = "answers cannot be held to a form"
_PROBABILITIES = "log probabilities are not computed"
_ENDS = "generations end at the model's end tokens, stop strings and max_tokens"
_TEXT = "text alone goes in and comes out"
_EXTRAS = "answers have OpenAI's fields alone"
_PROMPT = "prompts are read as they are, whole"
_TEMPLATE = "conversations are rendered by the model's own template, for a new answer"
_THOUGHTS = "how a model thinks is its template's business: give chat_template_kwargs"
_MODEL = "there is one model, as it was loaded"

ROWS: tuple[Field, ...] = (
    _applied("model", kinds.text(1024), "the served model's name, as `/v1/models` has it; another one is a 404"),
    _applied("messages", kinds.LIST, "the conversation to be answered", "chat"),
    _applied("prompt", kinds.prompts(), "what is to be continued; each prompt gets a choice", "completions"),
    _applied("max_tokens", _NEW, "new tokens, at most; default: 16 of a completion, of a chat what the context leaves"),
    _applied("max_completion_tokens", _NEW, "the same as `max_tokens`; both only if they are equal"),
    _applied("temperature", kinds.number(0, 100), "divides the logits; 0 is greedy"),
    _applied("top_p", kinds.number(0, 1, "a number above 0, to 1", without=0),
             "only the likeliest tokens whose probabilities sum to p are drawn; 1 is off"),
    _applied("top_k", kinds.integer(-1, 2**31 - 1), "only the k likeliest tokens are drawn; 0 and -1 are off"),
    _applied("min_p", kinds.number(0, 1, "a number from 0 to below 1", without=1),
             "only tokens at least p times as likely as the best one are drawn; 0 is off"),
    _applied("seed", kinds.integer(-(2**63), 2**63 - 1),
             "of the draws, modulo 2^32; -1, which is the default: another for each prompt"),
    _applied("stop", kinds.stops(), "texts before which an answer ends"),
    _applied("stream", kinds.FLAG, "pieces of the answer as server-sent events"),
    _applied("stream_options", kinds.OBJECT, "its parts are below; without `stream` they mean nothing"),
    _applied("stream_options.include_usage", kinds.FLAG, "a stream ends with a chunk that counts tokens"),
    _applied("chat_template_kwargs", kinds.template_options(RESERVED),
             "options of the chat template, such as `enable_thinking`", "chat"),
    _applied("reasoning_effort", kinds.text(32), "an option of the chat template (GPT-OSS: low, medium or high)",
             "chat"),
    _applied("tools", kinds.ITEMS,
             'functions that the model may call, `{"type": "function", "function": {"name": ..., "parameters": ...}}`, '
             "rendered by its chat template", "chat"),
    _applied("tool_choice", kinds.one_of("auto", "none", why="nothing holds a model to a call"),
             "whether the model is told of the tools", "chat"),
    _applied("parallel_tool_calls", kinds.FLAG, "with false, of several calls in an answer only the first is given",
             "chat"),
    # OpenAI's.
    *_accepted("user safety_identifier metadata", "names who asks; nothing is kept"),
    *_accepted("store", "nothing is ever kept; the answer is the same"),
    *_accepted("service_tier", "there is one tier"),
    *_accepted("prompt_cache_key prompt_cache_options prompt_cache_retention cache_salt",
               "about a cache of prompts; there is none, and answers do not depend on it"),
    *_accepted("prediction", "a guess of the answer, for speed"),
    *_refused({"n": (1,), "best_of": (1,), "n_cmpl": (1,)},
              "each prompt gets one answer; for more, repeat it in the list `prompt`, or ask again"),
    *_refused({"frequency_penalty": (0,), "presence_penalty": (0,)}, _PENALTIES),
    *_refused({"logit_bias": ({},)}, "tokens cannot be favoured or banned"),
    *_refused({"logprobs": (False,), "top_logprobs": (0,)}, _PROBABILITIES),
    *_refused({"response_format": ({"type": "text"},)}, _FORMS),
    *_refused({"functions": ([],), "function_call": ("none", "auto")}, "give tools and tool_choice"),
    *_refused({"modalities": (["text"],), "audio": ()}, _TEXT),
    *_refused({"verbosity": ("medium",)}, "ask for it in a message"),
    *_refused("web_search_options moderation", "there is the model alone"),
    *_refused({"echo": (False,)}, "answers do not repeat the prompt: put it before them"),
    *_refused({"suffix": ("",)}, "text is continued, not filled in"),
    *_refused({"stream_options.include_obfuscation": (False,)}, "chunks are not padded"),
    *_refused({"stream_options.continuous_usage_stats": (False,)}, "tokens are counted at the end: give include_usage"),
    # vLLM's, and those of servers with its names.
    *_refused({"repetition_penalty": (1,), "length_penalty": (1,)}, _PENALTIES),
    *_refused({"use_beam_search": (False,)}, "there is no beam search"),
    *_refused({"stop_token_ids": ([],), "ignore_eos": (False,), "min_tokens": (0,), "stop_regex": ([], ""),
               "include_stop_str_in_output": (False,), "no_stop_trim": (False,), "repetition_detection": ()}, _ENDS),
    *_refused({"skip_special_tokens": (True,), "spaces_between_special_tokens": (True,)},
              "special tokens are no text that comes back"),
    *_refused({"truncate_prompt_tokens": ()}, f"{_PROMPT}: one that is too long is refused"),
    *_accepted("truncation_side", "about `truncate_prompt_tokens`, which is refused"),
    *_refused({"prompt_logprobs": (), "logprob_token_ids": (), "return_tokens_as_token_ids": (False,)}, _PROBABILITIES),
    *_refused({"allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],), "custom_logit_processor": ()},
              "tokens cannot be favoured or banned"),
    *_refused({"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (),
               "documents": ([],)}, _TEMPLATE),
    *_refused({"add_special_tokens": (True,)}, "prompts get the model's special tokens; send token ids for another one",
              "completions"),
    *_refused({"add_special_tokens": (False,)}, _TEMPLATE, "chat"),
    *_refused({"prompt_embeds": (), "input_ids": (), "input_embeds": ()}, "send text or token ids as `prompt`"),
    *_refused({"mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "images_config": ({},)}, _TEXT),
    *_refused("guided_json guided_regex guided_choice guided_grammar structured_outputs structural_tag regex ebnf",
              _FORMS),
    *_accepted("guided_decoding_backend guided_whitespace_pattern", "about `guided_json` and the like, all refused"),
    *_refused({"priority": (0,)}, "first come, first served"),
    *_refused("request_id rid", "the server gives ids"),
    *_accepted("session_id extra_key custom_labels", "names requests that belong together; nothing is kept"),
    *_refused({"return_token_ids": (False,), "return_token_offsets": (False,), "return_prompt_text": (False,),
               "return_hidden_states": (False,), "return_routed_experts": (False,),
               "return_cached_tokens_details": (False,)}, _EXTRAS),
    *_accepted("return_mm_kwargs routed_experts_prompt_start routed_experts_start_len",
               "about what answers here never have"),
    *_refused({"include_reasoning": (True,), "separate_reasoning": (True,), "stream_reasoning": (True,)},
              "what a model with channels thinks comes as reasoning_content"),
    *_refused({"thinking_token_budget": (-1,), "thinking_budget": (-1,)}, "thoughts are not counted: lower max_tokens"),
    *_refused("enable_thinking thinking reasoning think", _THOUGHTS),
    *_refused({"watermarking": (False,)}, _PENALTIES),
    *_refused({"kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},), "custom_params": ({},),
               "session_params": ({},)}, "there are no extensions"),
    *_refused("bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank "
              "ngram_corpus_id", "there is one server"),
    *_accepted("stream_interval", "how many tokens a chunk has at most; the text is the same"),
    # llama.cpp's.
    *_refused({"n_predict": (), "num_predict": (), "max_new_tokens": (), "max_length": ()}, "give max_tokens"),
    *_accepted("cache_prompt n_cache_reuse id_slot slot_id backend_sampling speculative.n_max speculative.n_min "
               "speculative.p_min speculative.type", "about speed; the answer is the same"),
    *_accepted("n_keep n_discard", f"about what is dropped of long prompts; {_PROMPT}"),
    *_accepted("sse_ping_interval", "about silent connections; events are the same"),
    *_refused({"repeat_penalty": (1,), "dry_multiplier": (0,), "penalty_prompt": ("",)}, _PENALTIES),
    *_accepted("repeat_last_n penalize_nl", "about `repeat_penalty`, which is refused unless it is off"),
    *_accepted("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
               "about `dry_multiplier`, which is refused unless it is off"),
    *_refused({"typical_p": (1,), "typical": (1,), "tfs_z": (1,), "top_n_sigma": (-1,), "xtc_probability": (0,),
               "dynatemp_range": (0,), "mirostat": (0,), "adaptive_target": (-1,), "min_keep": (0, 1),
               "samplers": ([],), "top_a": (0,), "sampler_priority": ([],)}, _SAMPLERS),
    *_accepted("xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta adaptive_decay",
               "about samplers that are refused unless they are off"),
    *_refused({"n_probs": (0,), "post_sampling_probs": (False,)}, _PROBABILITIES),
    *_refused({"grammar": ("",), "json_schema": (), "n_indent": (0,)}, _FORMS),
    *_accepted("grammar_type grammar_lazy grammar_triggers preserved_tokens", "about `grammar`, which is refused"),
    *_refused({"t_max_predict_ms": (0, -1), "t_max_prompt_ms": (0, -1)}, _ENDS),
    *_refused({"return_tokens": (False,), "return_progress": (False,), "timings_per_token": (False,),
               "verbose": (False,), "response_fields": ([],)}, _EXTRAS),
    *_refused({"input_prefix": ("",), "input_suffix": ("",), "input_extra": ([],)}, "text is continued, not filled in"),
    *_refused({"system_prompt": ("",)}, "send it as a message"),
    *_refused({"image_data": ([],), "multimodal_data": ([],)}, _TEXT),
    *_refused({"lora": ([],), "lora_path": (), "lora_request": ()}, _MODEL),
    *_refused({"chat_format": (), "chat_parser": (), "generation_prompt": (), "parse_tool_calls": (False,),
               "thinking_forced_open": (False,)}, _TEMPLATE),
    *_refused({"reasoning_format": ("auto",), "reasoning_in_content": (False,), "reasoning_control": (False,),
               "reasoning_budget_tokens": (-1,)}, _THOUGHTS),
    *_accepted("reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message",
               "about `reasoning_budget_tokens`, which is refused unless it is off"),
    # Others that users bring along.
    *_refused({"do_sample": (), "num_beams": (1,)}, "give temperature: 0 is greedy"),
    *_refused({"options": ({},), "format": ("",), "template": ("",), "raw": (False,)}, "give OpenAI's fields"),
    *_accepted("keep_alive", "the model stays loaded"),
    *_refused({"system": ("",), "context": ([],), "images": ([],)}, "send it as a message"),
)  # fmt: skip

# vLLM's fields of the two that have nothing to do with answers.
_MODEL_NAME = _applied("model", kinds.text(1024), "one of the names that `/v1/models` has; it may be left out")
TOKENIZE: tuple[Field, ...] = (
    _MODEL_NAME,
    _applied("prompt", kinds.ANY_TEXT, "what is tokenized"),
    _applied("messages", kinds.LIST, "instead, a conversation, as the model's chat template renders it for an answer"),
    _applied("add_special_tokens", kinds.FLAG, "whether a prompt gets the model's special tokens; default: true"),
    _applied("tools", kinds.ITEMS, "functions that the conversation's template is given"),
    _applied("chat_template_kwargs", kinds.template_options(RESERVED), "options of the chat template"),
    *_refused({"return_token_strs": (False,)}, "send the tokens to /detokenize"),
    *_refused({"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()}, _TEMPLATE),
    *_refused({"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}, _TEXT),
)
DETOKENIZE: tuple[Field, ...] = (
    _MODEL_NAME,
    _applied("tokens", kinds.TOKENS, "what becomes text, special tokens left out"),
)
OTHERS: Mapping[str, tuple[Field, ...]] = {"/tokenize": TOKENIZE, "/detokenize": DETOKENIZE}
