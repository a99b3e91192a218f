"""What users call the choices of an agent, and what an `AgentConfig` calls them.

Each of these functions raises ConfigurationError for a name that means nothing, with the names that do.
"""

from kvferry.agent.config import STAGING_BYTES, staging_named
from kvferry.plan.digests.subject import digest_policy_named
from kvferry.plan.programs.copies import direction_named, may_switch_direction
from kvferry.staging.device.table import StagingMemory, staging_memory_named

__all__ = [
    "STAGING_BYTES",
    "StagingMemory",
    "digest_policy_named",
    "direction_named",
    "may_switch_direction",
    "staging_memory_named",
    "staging_named",
]
