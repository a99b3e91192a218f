"""What is in answers: those of engines, in each API's format, and those that the router gives by itself.

Enters: the bodies and events of an engine's answer, or why there is none. Leaves: what they say of a request and its
cache, and the same events with other usage. Pure: it knows no instance and no state of a request.
"""
