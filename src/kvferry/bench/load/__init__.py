"""Requests, when they are due, and what came back."""
