"""The half in each vLLM worker: it owns the rank's agent and reports what has ended."""
