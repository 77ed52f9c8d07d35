"""What GetServerInfo and GetLoads tell of a worker."""

from cluster.worker_info import WorkerStatus
from tandem.v1 import generation_pb2


def worker_info(worker: WorkerStatus) -> generation_pb2.WorkerInfo:
    """For GetServerInfo."""
    info = worker.info
    return generation_pb2.WorkerInfo(
        worker_id=info.worker_id if info else "",
        role=info.role.value if info else "",
        address=worker.address,
        instance_id=info.instance_id if info else "",
        ready=worker.ready,
    )


def worker_load(worker: WorkerStatus) -> generation_pb2.WorkerLoad | None:
    """For GetLoads; none of a worker that has not said."""
    info, load = worker.info, worker.load
    if info is None or load is None:
        return None
    return generation_pb2.WorkerLoad(
        worker_id=info.worker_id,
        role=info.role.value,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_transferring=load.num_transferring,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_active_blocks=load.num_active_blocks,
    )
