"""Engines and their ranks: the real sessions, and everything that they command.

Enters: what an engine wants, frames and events. Leaves: frames, tickets, copies and digests. It does not decide what
goes wrong.
"""
