"""What is reported of runs: the log of one, and the sums of many. It knows no engine."""
