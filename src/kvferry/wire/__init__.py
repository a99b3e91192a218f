"""What travels between two agents: frozen tagged records (`messages`) and the codec that refuses with a reason.

Enters: records, or frames of a peer, none of which is trusted. Leaves: frames, or checked records. It knows no socket
and no state.
"""
