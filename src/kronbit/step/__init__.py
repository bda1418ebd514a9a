"""One step: the plan, the schedule, update, refresh, precondition, failures."""
