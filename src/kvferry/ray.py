"""A fleet as an application of Ray Serve: `serve run kvferry.ray:app`. See docs/ray.md."""

from kvferry.cli.ray.application import app

__all__ = ["app"]
