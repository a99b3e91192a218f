"""`kvferry plan`: what moves where, as tables, JSON or a page."""
