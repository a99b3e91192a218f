"""What connects ranks: frames of the control channel, and tickets that move bytes.

Enters: commands of sessions, and faults. Leaves: frames and events for whoever has registered as a `Receiver`. It does
not know what a message means.
"""
