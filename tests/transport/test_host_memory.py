"""How much memory there is, for a process in a container or another control group as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.transport.machine.host_memory import HostMemory, host_memory

HOST = "MemTotal:       1000 kB\nMemFree:  9 kB\nMemAvailable:    250 kB\nHugePages_Total:       0\n"
KIB = 1 << 10
LIMIT, USED = str(500 * KIB), str(400 * KIB)
UNLIMITED = "9223372036854771712"
VERSION_1 = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


def memory_of(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return host_memory(root)


def group(path, limit, used, stat=""):
    """The files of a group of version 2; sizes in KiB."""
    names = (f"sys/fs/cgroup{path}/memory.{name}" for name in ("max", "current", "stat"))
    sizes = (limit if isinstance(limit, str) else str(limit * KIB), str(used * KIB), stat)
    return dict(zip(names, sizes, strict=True))


def old_group(path, limit, used, stat=""):
    """The files of a group of version 1; sizes in KiB."""
    names = (f"sys/fs/cgroup/memory{path}/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat"))
    sizes = (limit if isinstance(limit, str) else str(limit * KIB), str(used * KIB), stat)
    return dict(zip(names, sizes, strict=True))


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
        # So is what the kernel knows of files.
        (HOST, LIMIT, USED, f"file 0\nshmem 0\nslab_reclaimable {60 * KIB}", HostMemory(500 * KIB, 160 * KIB)),
        # There is no more room than the limit, when the sizes are not of the same moment.
        (HOST, str(200 * KIB), "1024", f"file {90 * KIB}\nshmem 0", HostMemory(200 * KIB, 200 * KIB)),
        ("", "", "", "", HostMemory()),
        ("", LIMIT, USED, "", HostMemory()),
    ],
)
def test_the_least_of_what_the_host_and_the_container_have(tmp_path, text, limit, used, stat, found):
    names = ("proc/meminfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat")
    assert memory_of(tmp_path, dict(zip(names, (text, limit, used, stat), strict=True))) == found


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        # MemoryMax= of a unit of systemd; a group that has no limit is in one that has.
        (group("/a/b", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
        (group("/a/b", "max", 10) | group("/a", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
        # The smallest room need not be that of the smallest limit.
        (group("/a/b", 300, 100) | group("/a", 400, 390), HostMemory(300 * KIB, 10 * KIB)),
        (group("/a/b", 300, 100) | group("/other", 5, 5), HostMemory(300 * KIB, 200 * KIB)),
        # A container sees its own group as the uppermost one.
        (group("", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
        (group("", 300, 100) | group("/a", 5, 5), HostMemory(300 * KIB, 200 * KIB)),
        # Beside version 1.
        (group("/unified/a/b", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
    ],
)
def test_each_group_that_the_process_is_in_has_its_limit(tmp_path, groups, found):
    files = {"proc/meminfo": HOST, "proc/self/cgroup": "1:name=systemd:/elsewhere\n0::/a/b\n"}
    assert memory_of(tmp_path, files | groups) == found


OF_FILES = f"cache 1\ntotal_cache {80 * KIB}\ntotal_shmem {50 * KIB}"


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (old_group("/a/b", UNLIMITED, 100), HostMemory(1000 * KIB, 250 * KIB)),
        (old_group("/a/b", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
        (old_group("/a/b", 300, 100, OF_FILES), HostMemory(300 * KIB, 230 * KIB)),
        # A kernel that does not tell files from what processes share.
        (old_group("/a/b", 300, 100, f"total_cache {80 * KIB}"), HostMemory(300 * KIB, 200 * KIB)),
        (old_group("/a/b", UNLIMITED, 10) | old_group("/a", 300, 100), HostMemory(300 * KIB, 200 * KIB)),
        (old_group("", 300, 100) | old_group("/a", 5, 5), HostMemory(300 * KIB, 200 * KIB)),
        # The limit of a pod, of which its container sees nothing else.
        (
            old_group("", UNLIMITED, 100, f"hierarchical_memory_limit {300 * KIB}"),
            HostMemory(300 * KIB, 200 * KIB),
        ),
    ],
)
def test_so_has_each_group_of_version_1(tmp_path, groups, found):
    files = {"proc/meminfo": HOST, "proc/self/cgroup": "9:cpu,cpuacct:/c\n4:hugetlb,memory:/a/b\n0::/\n"}
    assert memory_of(tmp_path, files | groups) == found


def test_a_group_beside_those_that_a_container_sees_is_none_of_them(tmp_path):
    outside = {"proc/meminfo": HOST, "proc/self/cgroup": "0::/../other\n"}
    assert memory_of(tmp_path, outside | group("", 300, 100) | group("/../other", 5, 5)).total == 300 * KIB


@pytest.fixture
def limited():
    """A group of this kernel's with a limit, and one without a limit in it."""
    outer = VERSION_1 / f"kvferry-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(256 * MIB))
    except OSError as error:
        remove(inner, outer)
        pytest.skip(f"needs root, and control groups of version 1 at {VERSION_1}: {error}")
    yield outer
    remove(inner, outer)


def remove(*groups):
    for each in groups:
        if each.exists():
            each.rmdir()


ALLOCATING = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from kvferry import allocate_shared
from kvferry.errors import TransportError
fits = allocate_shared(64 << 20, "what fits")
try:
    allocate_shared(512 << 20, "what does not fit")
except TransportError as error:
    print(error.what)
"""


@pytest.mark.parametrize("name", [".", "inner"])
def test_the_kernel_kills_nobody_for_shared_memory_beyond_the_limit(limited, name):
    command = [sys.executable, "-c", ALLOCATING, str(limited / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "not enough memory for 'what does not fit'\n"), done.stderr
