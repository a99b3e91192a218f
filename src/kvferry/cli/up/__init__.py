"""`kvferry up`: the whole job on one machine, with the proof that it was done right."""
