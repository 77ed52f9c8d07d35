"""The command line: `tandem serve`, `chat`, `bench`, `status`, `doctor`.

`serve` is a cluster's own process (Ray, the gateway); the others are clients of its HTTP API and load none of it, but
for `doctor`, which asks nobody but the machine.
"""

import sys


def main() -> None:
    """The `tandem` command."""
    try:
        # Here, not above: Ctrl-C while it loads is no stack trace either.
        from cluster.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
