"""Timing: cases, contenders that take turns in them, the limits of the machine, reports and plots."""
