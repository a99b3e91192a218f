"""One side is killed amid a packed read: the other gets its blocks and its staging memory back, and goes on.

The source writes what is packed, over tcp and through a gate, so that "amid" is certain.
"""

from types import SimpleNamespace

import pytest
from chaos_support import Asking, Process, running, since
from conftest import eventually, prefilled
from test_main_job import prompt_of

pytestmark = pytest.mark.slow

LEASE_S = 4.0


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    """A prefill and a decode engine between which everything goes through staging memory."""
    logs = tmp_path_factory.mktemp("packed")
    common = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "tcp", "--num-blocks", "600")
    common += ("--strategy", "pack", "--lease-timeout", str(LEASE_S))
    p, d = (Process(logs / f"{name}.log", "serve", "--engine-id", name, *common) for name in ("p0", "d0"))
    with running(p, d):
        yield SimpleNamespace(p=p, d=d)


@pytest.fixture(autouse=True)
def nothing_is_lost(site):
    """Before each test a cache moves; after it, too, and then nothing is left in either engine."""
    works(site)
    yield
    works(site)
    for engine in (site.p, site.d):
        until_all_is_free(engine)


def works(site):
    answer = read(site, prompt_of(40, seed=1)).answer()
    assert (answer["kvferry"]["recomputed"], answer["kvferry"]["strategy"]) == ("", "pack")


def read(site, prompt):
    """The decode request of a prompt that is computed, under way."""
    params = prefilled(site.p.url, prompt)
    return Asking(site.d.url, {"prompt": prompt, "max_tokens": 12, "kv_transfer_params": params})


def until_packed(site):
    """Slots are gathered and wait at the gate, and have a place to go to."""
    eventually(
        lambda: site.p.num_reads > 0 and site.p.num_slots > 0 and site.d.num_slots > 0, "slots are being written"
    )


def until_all_is_free(engine):
    engine.until_free()
    eventually(lambda: engine.num_slots == 0, f"the slots of {engine.url} are free")


@pytest.mark.parametrize("is_held", [True, False], ids=["before it is written to", "while it is written to"])
def test_a_target_that_is_killed_amid_a_packed_read(site, is_held):
    """The source gives up what it has gathered: when the lease ends, or when nobody is there to be written to."""
    with site.p.held():
        read(site, prompt_of(2000, seed=2))
        until_packed(site)
        assert site.p.num_granted > 0
        killed = site.d.kill()
        if is_held:
            until_all_is_free(site.p)
    until_all_is_free(site.p)
    print(f"\nall was free {since(killed)} after the death; a lease is {LEASE_S} s")
    site.d.restart()


def test_a_source_that_is_killed_amid_a_packed_read(site):
    """The target gives up the places that it has kept for it, and computes the prompt itself."""
    prompt = prompt_of(2000, seed=3)
    with site.p.held():
        asking = read(site, prompt)
        until_packed(site)
        killed = site.p.kill()
        answer = asking.answer()
        print(f"\nanswered {since(killed)} after the death")
    assert answer["kvferry"]["recomputed"] in ("peer_lost", "transport")
    alone = Asking(site.d.url, {"prompt": prompt, "max_tokens": 12}).answer()
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    until_all_is_free(site.d)
    print(f"all of the target was free {since(killed)} after it")
    site.p.restart()
