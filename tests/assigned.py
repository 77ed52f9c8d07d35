"""What a ledger holds."""

from cluster.ledger import Ledger


def num_assigned(ledger: Ledger) -> int:
    """Sequences in flight from this gateway."""
    return sum(assignment.num_choices for assignment in ledger._assignments.values())
