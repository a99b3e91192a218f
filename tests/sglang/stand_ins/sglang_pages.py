"""A plug-in of SGLang's that gives out pages on CPUs, for versions that can only do it with Triton on a GPU.

SGLang 0.5.21 has no other way for pages of several tokens; later ones have.
"""


def register():
    from sglang.srt.mem_cache.allocator import paged

    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel, paged.alloc_decode_kernel = Kernel(extend), Kernel(decode)


class Kernel:
    """Called as a kernel of Triton's is: `kernel[grid](...)`."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


def extend(prefix_lens, seq_lens, last_loc, free_pages, out_indices, _, page_size):
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)


def decode(seq_lens, last_loc, free_pages, out_indices, _, page_size):
    new_pages = iter(free_pages.tolist())
    for number, (length, last) in enumerate(zip(seq_lens.tolist(), last_loc.tolist(), strict=True)):
        out_indices[number] = next(new_pages) * page_size if (length - 1) % page_size == 0 else last + 1
