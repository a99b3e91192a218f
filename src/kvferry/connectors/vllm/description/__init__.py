"""From vLLM's cache specifications and tensors to our description of a rank."""
