"""Hugging Face transformers with continuous batching as a kept engine with an OpenAI server: runs on any CPU."""
