"""Starts one decode worker without Ray: `python -m decode_worker --config worker.yaml`."""

from decode_worker.worker import DecodeWorker
from worker.main import run

if __name__ == "__main__":
    run("decode_worker", DecodeWorker)
