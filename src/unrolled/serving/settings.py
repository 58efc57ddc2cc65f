"""The settings of a server."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        host: address to listen at.
        port: TCP port; 0 takes a free port.
        keys: secret keys, one of which a client must send; if there are none, any client may send requests.
        rate: maximum rate of requests of a client, such as "600/minute"; None for no limit.
        origin: a web page on another server that may send requests, such as "https://example.org".
        timeout: maximum time of a request, in seconds.
        drain: seconds in which running requests must end once the server stops.
        body_bytes: maximum number of bytes of a body.
        upload_bytes: maximum number of bytes of a state that a client uploads.
        body_seconds: seconds in which a body must arrive, plus one for each MiB.
        header_seconds: seconds in which headers must arrive.

    Raises:
        ValueError: there are no keys although other machines can reach the server, or the rate is invalid.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    rate: str | None = None
    origin: str | None = None
    timeout: float = 300.0
    drain: float = 30.0
    body_bytes: int = 4 * 2**20
    upload_bytes: int = 256 * 2**20
    body_seconds: float = 10.0
    header_seconds: float = 8.0

    def __post_init__(self) -> None:
        if not self.loopback and not self.keys:
            raise ValueError(
                f"host is {self.host}, which other machines can reach, so keys are required; "
                f"{' and '.join(LOOPBACK)} need none"
            )
        if self.origin not in (None, "*", "null"):
            parts = urlsplit(self.origin)
            if not parts.netloc or self.origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(
                    f"origin is {self.origin!r}, but must be such as 'https://example.org', without a path"
                )
        if self.rate is not None:
            from limits import parse_many

            try:
                (_,) = parse_many(self.rate)
            except ValueError as error:
                raise ValueError(f"rate is {self.rate!r}, but must be one such as '600/minute'") from error

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return self.host in LOOPBACK


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file with one key per line.

    Raises:
        ValueError: there is no key, or a key is not printable ASCII.
        OSError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path} holds no key, but must hold one per line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError(f"{path} holds a key that is not made of printable ASCII characters")
    return keys
