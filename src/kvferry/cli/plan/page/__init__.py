"""The page that draws a plan: Python makes numbers, templates make tags."""
