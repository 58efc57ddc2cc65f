"""The memory that this process holds."""

from pathlib import Path

STATUS = Path("/proc/self/status")  # Linux only


def process_bytes(field: str) -> int:
    """Return a size from `/proc/self/status`: "VmRSS" is held now, "VmHWM" the peak."""
    status = STATUS.read_text(encoding="ascii", errors="replace")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])
