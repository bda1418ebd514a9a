"""What one step does: the plan, the schedule, update, refresh, precondition, failures."""
