"""A gateway in a process of its own, without Ray: what `benchmarks.gateway` measures.

    python -m benchmarks.gateway_process ADDRESS … [--profile FILE]

Prints the base URL once requests can be served, and ends with its input.
"""

import argparse
import asyncio
import cProfile
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.config import load_config
from cluster.gateway import Gateway
from cluster.membership import Membership


async def serve(addresses: Sequence[str], profile: cProfile.Profile | None) -> None:
    """From nothing to ready, and to the end of the input; what it does when it is ready is in the profile."""
    membership = Membership()
    gateway = Gateway(load_config(flags={"port": 0, "grpc_port": 0}), membership)
    try:
        for address in addresses:
            membership.add_worker(address)
        await gateway.start()
        print(gateway.base_url, flush=True)
        if profile is not None:
            profile.enable()
        await asyncio.to_thread(sys.stdin.read)
        if profile is not None:
            profile.disable()
    finally:
        await gateway.stop()
        await membership.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS", help="of a worker")
    parser.add_argument("--profile", type=Path, help="where cProfile's statistics go")
    arguments = parser.parse_args()
    profile = cProfile.Profile() if arguments.profile else None
    asyncio.run(serve(arguments.addresses, profile))
    if profile is not None:
        profile.dump_stats(arguments.profile)


if __name__ == "__main__":
    main()
