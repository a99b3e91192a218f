"""Cross-memory attach: the kernel copies between the memory of two processes of one host."""
