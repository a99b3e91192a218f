"""How much memory there is, for a process in a container as well."""

import pytest

from kvferry.transport.machine.host_memory import HostMemory, host_memory

HOST = "MemTotal:       1000 kB\nMemFree:  9 kB\nMemAvailable:    250 kB\nHugePages_Total:       0\n"
KIB = 1 << 10
LIMIT, USED = str(500 * KIB), str(400 * KIB)


@pytest.mark.parametrize(
    ("text", "limit", "used", "stat", "found"),
    [
        (HOST, "", "", "", HostMemory(1000 * KIB, 250 * KIB)),
        (HOST, "max", "512000", "", HostMemory(1000 * KIB, 250 * KIB)),
        (HOST, str(2000 * KIB), "1024", "", HostMemory(1000 * KIB, 250 * KIB)),
        (HOST, LIMIT, USED, "", HostMemory(500 * KIB, 100 * KIB)),
        # Models that were read are given up when memory is needed; what processes share is not.
        (
            HOST,
            str(500 * KIB),
            str(400 * KIB),
            f"anon 1\nfile {150 * KIB}\nshmem {100 * KIB}",
            HostMemory(500 * KIB, 150 * KIB),
        ),
        (HOST, LIMIT, USED, f"file {400 * KIB}\nshmem 0", HostMemory(500 * KIB, 250 * KIB)),
        ("", "", "", "", HostMemory()),
    ],
)
def test_the_least_of_what_the_host_and_the_container_have(tmp_path, text, limit, used, stat, found):
    names = ("proc/meminfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat")
    for name, content in zip(names, (text, limit, used, stat), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert host_memory(tmp_path) == found
