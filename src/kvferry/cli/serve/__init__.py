"""`kvferry serve`: one engine process: ours, vLLM's or SGLang's."""
