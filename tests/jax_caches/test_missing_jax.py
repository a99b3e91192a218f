"""Caches of JAX without JAX: one line says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from kvferry.extras import MissingExtraError, missing_modules


def test_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "kvferry.jax_caches", raising=False)
    with pytest.raises(MissingExtraError, match=r"jax is not installed: pip install 'kvferry\[jax\]'"):
        importlib.import_module("kvferry.jax_caches")


@pytest.mark.skipif(bool(missing_modules("jax")), reason="JAX is not installed: see make test-jax")
def test_its_names_are_there_and_in_the_documentation():
    from test_public_api import test_every_name_is_there_and_in_the_documentation as check

    check("kvferry.jax_caches")
