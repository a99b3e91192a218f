"""`kvferry doctor`: what this machine, and a peer, can do for transfers."""
