"""`kvferry simulate fleet`: options, a table, JSON, and a page."""
