"""What travels between two agents: frozen tagged records (`messages`) and the codec that refuses with a reason."""
