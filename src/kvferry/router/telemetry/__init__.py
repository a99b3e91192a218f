"""What the router tells operators: metrics, a line per request, spans.

Enters: events and durations. Leaves: figures and text. It decides nothing.
"""
