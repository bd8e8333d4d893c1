"""Attention of a chunk of a prompt over its past and itself, without a matrix of scores."""

from pallas_kernels.prompt_attention.api import prompt_attention as prompt_attention
from pallas_kernels.prompt_attention.config import PromptAttentionConfig as PromptAttentionConfig
from pallas_kernels.prompt_attention.config import unfit_sizes as unfit_sizes
from pallas_kernels.prompt_attention.reference import attention_bytes as attention_bytes
