"""`kvferry bench`: load for a server, and what came of it."""
