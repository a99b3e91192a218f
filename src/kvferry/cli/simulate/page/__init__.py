"""The page of a simulated fleet: facts in, one HTML file out."""
