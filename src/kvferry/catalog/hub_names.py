"""Names on the Hugging Face Hub of the models whose configs are shipped."""

from __future__ import annotations

from typing import Final

_NAMES: Final = {
    "bamba-9b": ("ibm-ai-platform/Bamba-9B-v1", "ibm-fms/Bamba-9B"),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1"),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"),
    "falcon-h1-7b": ("tiiuae/Falcon-H1-7B-Base", "tiiuae/Falcon-H1-7B-Instruct"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "jamba-1.5-mini": ("ai21labs/AI21-Jamba-1.5-Mini", "ai21labs/AI21-Jamba-Mini-1.5"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct",),
    "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    "mistral-small-3.2-24b": ("mistralai/Mistral-Small-3.2-24B-Instruct-2506",),
    "nemotron-h-8b": ("nvidia/Nemotron-H-8B-Base-8K",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
}

SHIPPED_AS: Final = {name.lower(): shipped for shipped, names in _NAMES.items() for name in names}
"""The shipped name of each, by its name on the Hub in lower case: the Hub takes any case."""
