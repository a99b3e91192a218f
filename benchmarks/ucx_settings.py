"""What UCX's own settings change for many rows over NIXL: each beside UCX as it is.

    python benchmarks/ucx_settings.py > benchmarks/results/ucx_settings.json
    sudo python benchmarks/ucx_settings.py --hosts --mebibytes 64 > benchmarks/results/ucx_settings_hosts.json

Prints JSON. UCX reads its settings once per process, so `transports.py --transports nixl` is run again for each
setting, in turns, and figures are medians over the rounds: gigabytes a second, and how many times those of UCX as it
is with the same transport. Over cross-memory attach and over TCP, on one host; with `--hosts` the setting that
kvferry chooses, between two network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from measuring import machine, say

TRANSPORTS = Path(__file__).with_name("transports.py")
ROW_BYTES = (256, 4 << 10, 64 << 10, 1 << 20)
# By what UCX may use; each list begins with UCX as it is, twice: what differs between these two means nothing.
AGAIN = "UCX_LOG_FILE=stderr"
SETTINGS: dict[str, tuple[str, ...]] = {
    "cma,tcp": (
        "",
        AGAIN,
        "UCX_CMA_TX_QUOTA=64",
        "UCX_CMA_SEG_SIZE=4m",
        "UCX_CMA_MAX_IOV=64",
        "UCX_ZCOPY_THRESH=0",
    ),
    "tcp": (
        "",
        AGAIN,
        "UCX_TCP_TX_SEG_SIZE=64k",
        "UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=256k",
        "UCX_TCP_SNDBUF=4m UCX_TCP_RCVBUF=4m",
        "UCX_TCP_MAX_POLL=64",
        "UCX_ZCOPY_THRESH=0",
    ),
}
BETWEEN_HOSTS = {"tcp": ("", AGAIN, "UCX_TCP_TX_SEG_SIZE=64k")}

Key = tuple[str, str, str, int]
"""What UCX may use, a setting, a direction, and the bytes of a row."""


def rates(transports: str, setting: str, options: list[str]) -> dict[Key, float]:
    """Gigabytes a second of one process."""
    variables = dict(each.split("=", 1) for each in setting.split())
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    device = {} if "--hosts" in options else {"UCX_NET_DEVICES": "lo"}
    environment = ours | {"UCX_TLS": transports, "UCX_LOG_FILE": "stderr"} | device | variables
    words = [sys.executable, str(TRANSPORTS), "--transports", "nixl", *options]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"with UCX_TLS={transports} {setting}: {done.stderr}")
    return {
        (transports, setting, row["direction"], row["row_bytes"]): round(
            row["num_rows"] * row["row_bytes"] / row["ms"] / 1e6, 4
        )
        for row in json.loads(done.stdout)["results"]
        if row["transport"] == "nixl" and row["row_bytes"] in ROW_BYTES
    }


def table(found: dict[Key, list[float]]) -> list[dict[str, Any]]:
    medians = {key: statistics.median(values) for key, values in found.items()}
    return [
        {
            "ucx_tls": transports,
            "setting": {"": "as it is", AGAIN: "as it is, again"}.get(setting, setting),
            "direction": direction,
            "row_bytes": row_bytes,
            "gigabytes_per_s": rate,
            "of_ucx_as_it_is": round(rate / medians[transports, "", direction, row_bytes], 2),
        }
        for (transports, setting, direction, row_bytes), rate in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=16)
    parser.add_argument("--hosts", action="store_true", help="the peer is on another host; needs root")
    arguments = parser.parse_args()
    options = ["--mebibytes", str(arguments.mebibytes), "--repeats", "3", *["--hosts"] * arguments.hosts]
    found: dict[Key, list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        chosen = BETWEEN_HOSTS if arguments.hosts else SETTINGS
        pairs = [(transports, setting) for transports, settings in chosen.items() for setting in settings]
        # In another order each time: what runs first may find the machine at its best.
        for transports, setting in random.Random(number).sample(pairs, len(pairs)):
            for key, rate in rates(transports, setting, options).items():
                found[key].append(rate)
        say(f"round {number + 1} of {arguments.rounds}")
    command = f"python benchmarks/{' '.join(['ucx_settings.py', *sys.argv[1:]])}"
    print(json.dumps({"command": command, "machine": machine(), "results": table(found)}, indent=1))


if __name__ == "__main__":
    main()
