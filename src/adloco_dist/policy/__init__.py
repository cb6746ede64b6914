"""Pure functions of plain values: layout, batches, merges, schedules, the plan; testable without a process."""
