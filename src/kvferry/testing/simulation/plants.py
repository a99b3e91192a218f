"""Defects that are put into the sessions on purpose: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from kvferry.testing.simulation import planted_sharing as sharing
from kvferry.testing.simulation import planted_sources as sources
from kvferry.testing.simulation import planted_staging as staging
from kvferry.testing.simulation import planted_targets as targets
from kvferry.testing.simulation.prefix_cache import KeepsFailed, PrefixCache
from kvferry.testing.simulation.prompts import Naming, TokensOnly


@dataclass(frozen=True, slots=True)
class Plant:
    """A defect, as the sessions that have it take the place of the real ones. Engines can have one as well: in how they
    name prompts, and in what they keep in their prefix caches."""

    name: str
    what: str
    source: type[SourceSession] = SourceSession
    target: type[TargetSession] = TargetSession
    naming: type[Naming] = Naming
    prefix_cache: type[PrefixCache] = PrefixCache


NO_PLANT = Plant("none", "the sessions as they are")

_ALL = (
    Plant("no-fence", "blocks are freed when a fetch fails, though a ticket is open", target=targets.NoFence),
    Plant("first-error", "blocks are freed at the first ticket that fails", target=targets.FirstError),
    Plant("no-word", "blocks are freed though the source may still write to them", target=targets.NoWord),
    Plant("silence-ends", "a source that is silent counts as one that has stopped", target=targets.SilenceEnds),
    Plant("no-grace", "what a dead source had sent is not waited for", target=targets.NoGrace),
    Plant("skip-valid", "a request is answered when its bytes have landed", target=targets.SkipValid),
    Plant("ignore-error", "a ticket that failed counts as arrived", target=targets.IgnoreError),
    Plant("no-heartbeat", "leases in use are not renewed", target=targets.NoHeartbeat),
    Plant("no-deadline", "a read may take for ever", target=targets.NoDeadline),
    Plant("twice-fetched", "a repeated answer is handled again by the target", target=targets.TwiceFetched),
    Plant("no-compare", "digests are made, but not compared", target=targets.NoCompare),
    Plant("uncounted", "a failure moves no counter", target=targets.Uncounted),
    Plant("count-readers", "completions are counted, whoever they come from", source=sources.CountReaders),
    Plant("ignore-expiry", "landed is valid although the lease has ended", source=sources.IgnoreExpiry),
    Plant("no-epoch", "nobody looks at epochs", source=sources.NoEpoch, target=targets.NoEpoch),
    Plant("by-request", "a claim finds its lease by the request's id alone", source=sources.ByRequest),
    Plant("by-lease", "a claim finds its lease by the lease's id alone", source=sources.ByLease),
    Plant("any-count", "more tokens are granted than were computed", source=sources.AnyCount),
    Plant("any-claim", "a lease is granted to whoever claims it", source=sources.AnyClaim),
    Plant("twice-freed", "a repeated message is handled again by the source", source=sources.TwiceFreed),
    Plant("keep-digest", "a digest goes on when its lease has ended", source=sources.KeepDigest),
    Plant("early-free", "blocks are given back though they are being written from", source=sources.EarlyFree),
    Plant("early-word", "an abort is acknowledged though its write is open", source=sources.EarlyWord),
    Plant("no-expiry", "a lease that nobody asks for never ends", source=sources.NoExpiry),
    Plant("hasty-states", "what is computed of some states counts for all", source=sources.HastyStates),
    Plant("cancel-ends", "a slot is given back though a read into it is open", target=staging.CancelEnds),
    Plant("forget-slots", "a slot is given back though its source may still write to it", target=staging.ForgetSlots),
    Plant("scatter-again", "a slot is scattered whenever it is told of", target=staging.ScatterAgain),
    Plant("lost-release", "a slot is not given back after its scatter has failed", target=staging.LostRelease),
    Plant("keep-wish", "a slot that is not wanted any more is waited for", source=staging.KeepWish),
    Plant("cancel-written", "a slot is given back though it is being written", source=staging.SourceCancelEnds),
    Plant("late-pack", "a slot is written though its claim has ended", source=staging.LatePack),
    Plant("pack-again", "a slot is written whenever it is asked for", source=staging.PackAgain),
    Plant("no-gather", "a slot is written before all of it is gathered", source=staging.NoGather),
    Plant("far-at-once", "a target's slot is given back though it is gathered into", source=staging.FarAtOnce),
    Plant("always-clean", "a write that ended badly counts as one that has landed", source=staging.AlwaysClean),
    Plant("half-there", "a shared read is there when the target's part is", target=sharing.HalfThere),
    Plant("late-share", "a part is written though its lease has ended", source=sharing.LateShare),
    Plant("share-again", "a part is written whenever it is claimed", source=sharing.ShareAgain),
    Plant("tokens-only", "a prompt is named by its tokens alone", naming=TokensOnly),
    Plant("keep-failed", "what was fetched in vain is kept in a prefix cache", prefix_cache=KeepsFailed),
    Plant("keep-records", "leases that have ended are remembered for ever", source=sources.KeepRecords),
)

PLANTS: Mapping[str, Plant] = {plant.name: plant for plant in _ALL}
"""All planted defects by name."""
