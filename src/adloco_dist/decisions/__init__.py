"""The policy: pure functions of plain values, testable without a process."""
