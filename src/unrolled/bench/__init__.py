"""Timing: cases, their interleaved contenders, the limits of the machine, reports and plots."""
