"""Cross-memory attach: the kernel copies between the memory of two processes of one host.

Enters: any host memory, a peer's process id and regions, rows. Leaves: copied bytes, or the reason why the kernel
refused. It needs no thread, socket or shared memory, and knows no session and no block.
"""
