"""`kvferry serve`: one engine process, of ours or vLLM's."""
