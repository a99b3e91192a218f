"""`kvferry top`: what a router and its engines are doing."""
