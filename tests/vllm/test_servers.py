"""What the servers of these tests are given, before any of them runs."""

import contextlib
import socket

from servers import MOST_RANKS, PLAIN, Pair


def ports_of(pair):
    ranges = [range(first, first + MOST_RANKS) for first in (server.side_port for server in pair.servers)]
    return [*(server.port for server in pair.servers), *(port for each in ranges for port in each)]


def can_be_had(port, *, by_a_server):
    with socket.socket() as somebody, contextlib.suppress(OSError):
        somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, by_a_server)
        somebody.bind(("127.0.0.1", port))
        somebody.listen()
        return True
    return False


def test_ports_are_kept_for_one_server_until_it_is_stopped(tmp_path):
    pair = Pair.create(PLAIN, "FerryConnector", tmp_path)
    ports = ports_of(pair)
    assert len(set(ports)) == len(ports) == 2 * (1 + MOST_RANKS)
    assert not any(can_be_had(port, by_a_server=False) for port in ports)
    assert all(can_be_had(port, by_a_server=True) for port in ports)
    pair.stop()
    assert all(can_be_had(port, by_a_server=False) for port in ports)
