"""A plug-in of SGLang's that mends its attention on CPUs, for models with sliding windows.

The backend `torch_native` of SGLang 0.5.23 writes a row of a window where its own part of the pool has it, and reads it
by the number of the other part. Answers are wrong as soon as the two differ, with or without any transfer.
"""

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        HookRegistry.register(f"{BACKEND}.{name}", read_windows, HookType.AROUND)


def read_windows(original, backend, query, output, keys, values, rows, *more, sliding_window_size=None, **named):
    if backend.use_sliding_window_kv_pool and sliding_window_size is not None and sliding_window_size > -1:
        rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
    return original(backend, query, output, keys, values, rows, *more, sliding_window_size=sliding_window_size, **named)
