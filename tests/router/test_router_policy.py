"""Laws of the choice between instances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvferry.router.fleet.instance import InstanceRequest, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.least_work import choose
from kvferry.router.policy.records import Instance, Load, NoInstance, Role
from kvferry.router.telemetry.metrics import Metrics

INSTANCES = tuple(Instance(f"http://h{i}", Role.DECODE) for i in range(6))


def pool_of(*instances) -> InstancePool:
    """A pool in which all of these are ready."""
    pool = InstancePool(instances, Metrics())
    for instance in instances:
        pool.probed(instance, ProbeResult.READY, "")
    return pool


def reserve(pool, role=Role.DECODE, *excluded) -> Reservation:
    found = pool.reserve(InstanceRequest(role, excluded=frozenset(excluded)))
    assert isinstance(found, Reservation)
    return found


@st.composite
def loads(draw):
    num = draw(st.integers(0, len(INSTANCES)))
    last = draw(st.permutations(range(num)))
    return [
        Load(instance, draw(st.booleans()), draw(st.integers(0, 4)), last[i])
        for i, instance in enumerate(INSTANCES[:num])
    ]


@given(loads())
def test_the_choice_is_healthy_least_loaded_and_longest_unchosen(loads):
    healthy = [load for load in loads if load.healthy]
    chosen = choose(loads)
    if not healthy:
        assert chosen is None
        return
    [load] = [load for load in healthy if load.instance == chosen]
    least = min(other.num_outstanding for other in healthy)
    assert load.num_outstanding == least
    assert all(load.last_chosen <= other.last_chosen for other in healthy if other.num_outstanding == least)


@given(loads(), st.randoms())
def test_the_choice_does_not_depend_on_the_order(loads, random):
    shuffled = list(loads)
    random.shuffle(shuffled)
    assert choose(loads) == choose(shuffled)


def test_a_tie_from_the_start_goes_to_the_first():
    assert choose([Load(i, True, 0, 0) for i in INSTANCES]) == INSTANCES[0]


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=60))
def test_idle_instances_take_turns_and_busy_ones_stay_level(num, finishes):
    """Requests arrive, or the oldest one ends: loads differ by at most what the endings took away."""
    pool = pool_of(*INSTANCES[:num])
    outstanding = {instance: 0 for instance in INSTANCES[:num]}
    running = []
    for finish in finishes:
        if finish and running:
            ended = running.pop(0)
            ended.release()
            outstanding[ended.instance] -= 1
        else:
            chosen = reserve(pool)
            assert outstanding[chosen.instance] == min(outstanding.values())
            running.append(chosen)
            outstanding[chosen.instance] += 1
    assert max(outstanding.values()) - min(outstanding.values()) <= 1


def turns(pool, num):
    """The numbers of the instances that get `num` requests one after the other."""
    found = []
    for _ in range(num):
        reservation = reserve(pool)
        found.append(INSTANCES.index(reservation.instance))
        reservation.release()
    return found


def test_sequential_requests_go_round():
    assert turns(pool_of(*INSTANCES[:3]), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_an_instance_back_from_an_outage_gets_its_share_and_not_more():
    pool = InstancePool(INSTANCES[:2], Metrics())
    pool.probed(INSTANCES[0], ProbeResult.READY, "")
    assert turns(pool, 5) == [0] * 5
    pool.probed(INSTANCES[1], ProbeResult.READY, "")
    assert turns(pool, 4) == [1, 0, 1, 0]


def test_excluded_unhealthy_and_other_roles_are_not_chosen():
    prefill = structs.replace(INSTANCES[3], role=Role.PREFILL)
    pool = InstancePool((*INSTANCES[:2], prefill), Metrics())
    assert pool.reserve(InstanceRequest(Role.DECODE)) == NoInstance()
    pool.probed(prefill, ProbeResult.READY, "")
    pool.probed(INSTANCES[0], ProbeResult.READY, "")
    assert reserve(pool).instance == INSTANCES[0]
    assert pool.reserve(InstanceRequest(Role.DECODE, excluded=frozenset(INSTANCES[:1]))) == NoInstance()
    assert reserve(pool, Role.PREFILL).instance == prefill
