"""What a model answers by itself, in this process: a control where no engine can give one."""

from __future__ import annotations


def greedy_tokens(path: str, prompt: str, max_tokens: int) -> tuple[int, ...]:
    """The likeliest tokens after a prompt, in the model's own dtype, until its end of text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    with torch.inference_mode():
        answer = model.generate(**tokens, max_new_tokens=max_tokens, do_sample=False)
    return tuple(answer[0, tokens["input_ids"].shape[1] :].tolist())
