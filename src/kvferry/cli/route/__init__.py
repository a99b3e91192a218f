"""`kvferry route`: the router."""
