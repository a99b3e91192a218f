"""Which addresses the control channel listens on: without a shared token, only this host's."""

from __future__ import annotations

from ipaddress import IPv6Address

from kvferry.agent.control.shared_token import SharedToken
from kvferry.errors import ConfigurationError
from kvferry.transport.machine.addresses import resolve

SAME_TOKEN = (
    "give every engine the same --token-file (vLLM: token_file in kv_connector_extra_config, "
    "SGLang: token_file in KVFERRY_SGLANG_CONFIG)"
)


def listening_address(host: str, token: SharedToken) -> str:
    """The IP address of a host's name. Raises ConfigurationError for one that must not or cannot be listened on."""
    address = resolve(host)
    if not (token or address.is_loopback):
        raise ConfigurationError(
            "without a shared token the control channel may listen on this host only",
            found=host,
            expected="127.0.0.1, or a token",
            hint=SAME_TOKEN,
        )
    if address.is_unspecified:
        raise ConfigurationError(
            "peers need a concrete address of this engine",
            found=host,
            expected="the address of one network interface",
            hint="give the address that the other engines reach, such as 10.0.0.5",
        )
    if isinstance(address, IPv6Address) and (address.scope_id or address.ipv4_mapped):
        raise ConfigurationError(
            "peers cannot use this form of an address",
            found=host,
            expected="an address that means the same on every host",
            hint="give the IPv4 address itself" if address.ipv4_mapped else "give an address without an interface",
        )
    return str(address)
