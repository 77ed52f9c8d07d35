"""What is in flight at each worker: what the workers report, and what this gateway has assigned to them itself.

A worker's own reports of load lag behind, and between two of them a gateway may assign a hundred requests. So the
ledger counts every assignment, from `assign` until `release` (`first_token` ends the prefill's share), and takes a
report as the load of then plus what has been assigned since. Requests that ended a moment ago still count as recent,
halving with time.

What is assigned is a prompt: it counts once for who prefills it, and once a choice for who decodes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.plan import Plan
from cluster.worker_info import WorkerInfo, WorkerLoad


@dataclass(slots=True)
class Account:
    """One worker's."""

    info: WorkerInfo
    load: WorkerLoad
    # Assigned by this gateway and not released.
    num_requests: int = 0
    num_tokens: int = 0  # to be prefilled
    # The same at the time of the last report.
    num_requests_reported: int = 0
    num_tokens_reported: int = 0
    # Requests assigned lately, halving with time.
    recent: float = 0.0
    recent_at: float = 0.0
    last_chosen: int = 0  # turn

    @property
    def requests(self) -> int:
        """In flight: what was reported and what has been assigned since, and never less than what is known here."""
        since = self.num_requests - self.num_requests_reported
        return max(self.num_requests, self.load.num_requests + since)

    @property
    def tokens(self) -> int:
        """Waiting to be prefilled, likewise."""
        since = self.num_tokens - self.num_tokens_reported
        return max(self.num_tokens, self.load.num_waiting_tokens + since)


@dataclass(slots=True)
class _Assignment:
    """What a prompt counts, and where; None: nowhere any more."""

    decode: str | None
    prefill: str | None  # the decode worker's id if local
    num_tokens: int  # to be prefilled
    num_choices: int  # that have not ended


class Ledger:
    """The accounts of all workers that are there. Workers are named by their instance id.

    Args:
        recent_half_life_s: in which a recent request comes to count half.
    """

    def __init__(self, recent_half_life_s: float) -> None:
        self._recent_half_life_s = recent_half_life_s
        self._accounts: dict[str, Account] = {}
        self._assignments: dict[str, _Assignment] = {}
        self._turn = 0

    # --- who is there

    def add_worker(self, info: WorkerInfo) -> None:
        """A worker is ready."""
        self._accounts[info.instance_id] = Account(info, WorkerLoad())

    def remove_worker(self, instance_id: str) -> None:
        """A worker is gone. Requests that were there are released later, and must not count then. Idempotent."""
        if self._accounts.pop(instance_id, None) is None:
            return
        for assignment in self._assignments.values():
            if assignment.prefill == instance_id:
                assignment.prefill = None
            if assignment.decode == instance_id:
                assignment.decode = None

    def update_load(self, instance_id: str, load: WorkerLoad) -> None:
        """A worker's own report; one of a worker that is gone means nothing."""
        account = self._accounts.get(instance_id)
        if account is not None:
            account.load = load
            account.num_requests_reported = account.num_requests
            account.num_tokens_reported = account.num_tokens

    def load(self, instance_id: str) -> WorkerLoad | None:
        """What the worker last reported; None if it is not there."""
        account = self._accounts.get(instance_id)
        return account.load if account else None

    @property
    def accounts(self) -> Mapping[str, Account]:
        """By instance id."""
        return self._accounts

    def recent(self, account: Account, now: float) -> float:
        """Requests assigned lately, each counting less the older it is."""
        return account.recent * math.pow(0.5, (now - account.recent_at) / self._recent_half_life_s)

    # --- what is assigned

    def assign(self, request_id: str, plan: Plan, now: float, num_choices: int = 1) -> None:
        """The prompt goes where `plan` says; its choices count there, each until it is released."""
        assert request_id not in self._assignments, f"{request_id} is assigned already"
        self._turn += 1
        decode, prefill = plan.decode.instance_id, plan.prefills.instance_id
        self._assignments[request_id] = _Assignment(decode, prefill, plan.num_uncached_tokens, num_choices)
        self._change(decode, requests=num_choices)
        self._chosen(decode, now, num_choices)
        if prefill != decode:
            self._change(prefill, requests=1)
            self._chosen(prefill, now)
        self._change(prefill, tokens=plan.num_uncached_tokens)

    def reassign_prefill(self, request_id: str, prefill: WorkerInfo | None, now: float) -> None:
        """Another prefill worker (None: the decode worker) computes what the first one owed."""
        assignment = self._assignments[request_id]
        self.first_token(request_id)
        key = prefill.instance_id if prefill else assignment.decode
        if key is not None and key in self._accounts:
            assignment.prefill = key
            self._change(key, requests=int(key != assignment.decode), tokens=assignment.num_tokens)
            self._turn += 1
            self._chosen(key, now)

    def first_token(self, request_id: str) -> None:
        """The prefill's share has ended. Idempotent."""
        assignment = self._assignments.get(request_id)
        if assignment is not None and assignment.prefill is not None:
            is_apart = assignment.prefill != assignment.decode
            self._change(assignment.prefill, requests=-int(is_apart), tokens=-assignment.num_tokens)
            assignment.prefill = None

    def release(self, request_id: str) -> None:
        """A choice of the prompt has ended, whichever way; nothing if none is left."""
        assignment = self._assignments.get(request_id)
        if assignment is None:
            return
        assignment.num_choices -= 1
        if assignment.decode is not None:
            self._change(assignment.decode, requests=-1)
        if not assignment.num_choices:
            self.first_token(request_id)
            del self._assignments[request_id]

    def _change(self, instance_id: str, *, requests: int = 0, tokens: int = 0) -> None:
        account = self._accounts[instance_id]
        account.num_requests += requests
        account.num_tokens += tokens

    def _chosen(self, instance_id: str, now: float, num_requests: int = 1) -> None:
        account = self._accounts[instance_id]
        account.last_chosen = self._turn
        account.recent = self.recent(account, now) + num_requests
        account.recent_at = now

    def check_integrity(self) -> None:
        """Proves that what is assigned to the workers is what requests hold; for tests."""
        for key, account in self._accounts.items():
            held = [a for a in self._assignments.values() if a.decode == key]
            pulled = [a for a in self._assignments.values() if a.prefill == key]
            requests = sum(a.num_choices for a in held) + sum(a.decode != key for a in pulled)
            tokens = sum(a.num_tokens for a in pulled)
            assert account.num_requests == requests, f"{key} counts {account.num_requests} requests, not {requests}"
            assert account.num_tokens == tokens, f"{key} counts {account.num_tokens} tokens, not {tokens}"
