"""A plug-in of SGLang's that mends its attention on CPUs, the backend `torch_native` of SGLang 0.5.23.

Of models with sliding windows it writes a row of a window where its own part of the pool has it, and reads it by the
number of the other part. Answers are wrong as soon as the two differ, with or without any transfer. With data
parallelism of attention, an engine that has nothing to do computes batches of no tokens, which ends the server.
"""

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
ROTARY = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        HookRegistry.register(f"{BACKEND}.{name}", read_windows, HookType.AROUND)
    HookRegistry.register(f"{ROTARY}.forward_native", turn_tokens, HookType.AROUND)
    add_fill_value()


def read_windows(original, backend, query, output, keys, values, rows, *more, sliding_window_size=None, **named):
    if backend.use_sliding_window_kv_pool and sliding_window_size is not None and sliding_window_size > -1:
        rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
    return original(backend, query, output, keys, values, rows, *more, sliding_window_size=sliding_window_size, **named)


def turn_tokens(original, embedding, positions, query, key, *more, **named):
    """Of no tokens nobody can say how many heads each has."""
    return original(embedding, positions, query, key, *more, **named) if positions.numel() else (query, key)


def add_fill_value():
    """As in SGLang's other backend for CPUs: how many tokens a request has that is there to fill a batch."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1
