"""The user's settings, read from `KVFERRY_SGLANG_CONFIG`: SGLang has no option for what a backend wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import ConfigurationError
from kvferry.options import STAGING_BYTES

VARIABLE = "KVFERRY_SGLANG_CONFIG"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the JSON object, all optional. They mean what they mean in `kv_connector_extra_config` on vLLM.

    `engine_id` names this server to others. If it is empty, a name is made up. `host` is the address on which the
    control channel listens and is reached. `lease_s` is how long a computed cache waits for its reader, in seconds.
    """

    engine_id: str = ""
    host: str = "127.0.0.1"
    token_file: str = ""
    transport: str = "auto"
    transfer_direction: str = "auto"
    digest: str = "sampled"
    strategy: str = "auto"
    staging_bytes: Annotated[int, Meta(ge=1)] = STAGING_BYTES
    staging_memory: str = "host"
    lease_s: Annotated[float, Meta(gt=0)] = 30.0


def settings_from(environment: Mapping[str, str]) -> Settings:
    """The settings in an environment. Raises ConfigurationError for what is no JSON object of these keys."""
    try:
        return msgspec.json.decode(environment.get(VARIABLE, "{}"), type=Settings)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{VARIABLE} cannot be read",
            found=str(error),
            expected=f"a JSON object with some of {', '.join(Settings.__struct_fields__)}",
        ) from error
