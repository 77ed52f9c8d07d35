"""Starts one prefill worker without Ray: `python -m prefill_worker --config worker.yaml`."""

from prefill_worker.worker import PrefillWorker
from worker.main import run

if __name__ == "__main__":
    run("prefill_worker", PrefillWorker)
