"""Defects that are put into the sessions on purpose: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession
from simulator.defects import engines, sharing, sources, staging, targets
from simulator.state.prefix_cache import PrefixCache
from simulator.state.prompts import Naming


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect, as the sessions that have it take the place of the real ones. Engines can have one as well: in how they
    name prompts, and in what they keep in their prefix caches."""

    name: str
    what: str
    source: type[SourceSession] = SourceSession
    target: type[TargetSession] = TargetSession
    naming: type[Naming] = Naming
    prefix_cache: type[PrefixCache] = PrefixCache


NO_DEFECT = Defect("none", "the sessions as they are")

_ALL = (
    Defect("no-fence", "blocks are freed when a fetch fails, though a ticket is open", target=targets.NoFence),
    Defect("first-error", "blocks are freed at the first ticket that fails", target=targets.FirstError),
    Defect("no-word", "blocks are freed though the source may still write to them", target=targets.NoWord),
    Defect("silence-ends", "a source that is silent counts as one that has stopped", target=targets.SilenceEnds),
    Defect("no-grace", "what a dead source had sent is not waited for", target=targets.NoGrace),
    Defect("any-transport", "a lost source counts as refused, whatever it writes over", target=targets.AnyTransport),
    Defect("near-slots", "a lost source that gathers into our slots counts as refused", target=targets.NearSlots),
    Defect("skip-valid", "a request is answered when its bytes have landed", target=targets.SkipValid),
    Defect("ignore-error", "a ticket that failed counts as arrived", target=targets.IgnoreError),
    Defect("no-heartbeat", "leases in use are not renewed", target=targets.NoHeartbeat),
    Defect("no-deadline", "a read may take for ever", target=targets.NoDeadline),
    Defect("twice-fetched", "a repeated answer is handled again by the target", target=targets.TwiceFetched),
    Defect("no-compare", "digests are made, but not compared", target=targets.NoCompare),
    Defect("uncounted", "a failure moves no counter", target=targets.Uncounted),
    Defect("count-readers", "completions are counted, whoever they come from", source=sources.CountReaders),
    Defect("ignore-expiry", "landed is valid although the lease has ended", source=sources.IgnoreExpiry),
    Defect("no-epoch", "nobody looks at epochs", source=sources.NoEpoch, target=targets.NoEpoch),
    Defect("by-request", "a claim finds its lease by the request's id alone", source=sources.ByRequest),
    Defect("by-lease", "a claim finds its lease by the lease's id alone", source=sources.ByLease),
    Defect("any-count", "more tokens are granted than were computed", source=sources.AnyCount),
    Defect("any-claim", "a lease is granted to whoever claims it", source=sources.AnyClaim),
    Defect("twice-freed", "a repeated message is handled again by the source", source=sources.TwiceFreed),
    Defect("keep-digest", "a digest goes on when its lease has ended", source=sources.KeepDigest),
    Defect("early-free", "blocks are given back though they are being written from", source=sources.EarlyFree),
    Defect("early-word", "an abort is acknowledged though its write is open", source=sources.EarlyWord),
    Defect("no-expiry", "a lease that nobody asks for never ends", source=sources.NoExpiry),
    Defect("hasty-states", "what is computed of some states counts for all", source=sources.HastyStates),
    Defect("cancel-ends", "a slot is given back though a read into it is open", target=staging.CancelEnds),
    Defect("forget-slots", "a slot is given back though its source may still write to it", target=staging.ForgetSlots),
    Defect("scatter-again", "a slot is scattered whenever it is told of", target=staging.ScatterAgain),
    Defect("lost-release", "a slot is not given back after its scatter has failed", target=staging.LostRelease),
    Defect("keep-request", "a slot that is not wanted any more is waited for", source=staging.KeepRequest),
    Defect("cancel-written", "a slot is given back though it is being written", source=staging.SourceCancelEnds),
    Defect("late-pack", "a slot is written though its claim has ended", source=staging.LatePack),
    Defect("pack-again", "a slot is written whenever it is asked for", source=staging.PackAgain),
    Defect("no-gather", "a slot is written before all of it is gathered", source=staging.NoGather),
    Defect("far-at-once", "a target's slot is given back though it is gathered into", source=staging.FarAtOnce),
    Defect("always-clean", "a write that ended badly counts as one that has landed", source=staging.AlwaysClean),
    Defect("half-there", "a shared read is there when the target's part is", target=sharing.HalfThere),
    Defect("late-share", "a part is written though its lease has ended", source=sharing.LateShare),
    Defect("share-again", "a part is written whenever it is claimed", source=sharing.ShareAgain),
    Defect("tokens-only", "a prompt is named by its tokens alone", naming=engines.TokensOnly),
    Defect("keep-failed", "what was fetched in vain is kept in a prefix cache", prefix_cache=engines.KeepsFailed),
    Defect("keep-records", "leases that have ended are remembered for ever", source=sources.KeepRecords),
)

DEFECTS: Mapping[str, Defect] = {defect.name: defect for defect in _ALL}
"""All planted defects by name."""
