"""What a client asks for: its body, its headers, what its prompt will cost.

Enters: bytes and headers. Leaves: records. It knows no instance, no policy and no I/O.
"""
