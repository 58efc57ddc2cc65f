"""ONNX Runtime for browsers: its files, from a folder, the cache or npm, verified by their hashes."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from unrolled.extras import how_to_install
from unrolled.files import file_digest, write_file

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
BUILDS = {
    "wasm": {"module": "ort.wasm.bundle.min.mjs", "binary": "ort-wasm-simd-threaded.wasm"},
    "webgpu": {"module": "ort.webgpu.bundle.min.mjs", "binary": "ort-wasm-simd-threaded.asyncify.wasm"},
}
_ASYNCIFY = BUILDS["webgpu"]["binary"]
SHA256 = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort.webgpu.bundle.min.mjs": "0730816731ce2cdfb06f273da065d4a1c7091eb9d1756a83b2916c8a89d015e2",
    _ASYNCIFY: "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}
RUNTIME_INDEX = "runtime.json"
NAMES = {build["module"]: build["module"].replace(".mjs", ".js") for build in BUILDS.values()}
"""The names of modules on the page: not every server sends .mjs with the type of a script."""
LICENCES = {"LICENSE": "LICENSE.txt", "ThirdPartyNotices.txt": "ThirdPartyNotices.txt"}
TIMEOUT = 600.0  # seconds for npm to fetch 33 MB


def runtime_files(folder: str | Path | None = None, *, webgpu: bool = False) -> dict[str, Path]:
    """Find files of onnxruntime-web in a folder, in the cache or through npm, and verify their hashes.

    Raises:
        ValueError: a file is missing, or is not the published one.
    """
    builds = BUILDS if webgpu else {"wasm": BUILDS["wasm"]}
    names = [file for build in builds.values() for file in build.values()]
    if folder is not None:
        found = {name: Path(folder) / name for name in names}
        for name, path in found.items():
            if not path.is_file():
                raise ValueError(
                    f"{folder} has no {name}; it is in dist/ of the npm package {PACKAGE} {VERSION}"
                )
            if file_digest(path) != SHA256[name]:
                raise ValueError(f"{path} is not the file of {PACKAGE} {VERSION}: its SHA-256 differs")
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unrolled"
    kept = cache / f"{PACKAGE}-{VERSION}"
    found = {name: kept / name for name in names}
    if not all(path.is_file() and file_digest(path) == SHA256[name] for name, path in found.items()):
        kept.mkdir(parents=True, exist_ok=True)
        _fetch(found)
    return found


def write_runtime(folder: Path, found: Mapping[str, Path], licences: list[Path]) -> None:
    """Write the files of the runtime, its licences, and the manifest that the page verifies them against."""
    folder.mkdir(exist_ok=True)
    names = NAMES | LICENCES
    for path in [*found.values(), *licences]:
        write_file(folder / names.get(path.name, path.name), path.read_bytes())
    sizes = {name: path.stat().st_size for name, path in found.items()}
    record = {
        "version": VERSION,
        "builds": {
            name: build | {"module": NAMES[build["module"]]}
            for name, build in BUILDS.items()
            if build["binary"] in found
        },
        "files": {
            names.get(name, name): {"sha256": SHA256[name], "bytes": size} for name, size in sizes.items()
        },
        "bytes": max(sizes.values()),  # of the largest build, for the progress bar while loading
    }
    write_file(folder / RUNTIME_INDEX, json.dumps(record, indent=1))


def find_licences() -> list[Path]:
    """Return the licences of ONNX Runtime from its Python package."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise ImportError(f"a web page needs onnxruntime, which is missing: {how_to_install('onnx')}")
    return [Path(spec.origin).with_name(name) for name in LICENCES]


def _fetch(files: Mapping[str, Path]) -> None:
    """Download the package with npm, from its configured registry, and unpack files of it."""
    otherwise = (
        f"fetch it with `npm pack {PACKAGE}@{VERSION}` where there is a network, unpack it, "
        "and name its folder package/dist with --runtime"
    )
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"the page needs {PACKAGE} {VERSION}, but there is no npm to fetch it: {otherwise}")
    with tempfile.TemporaryDirectory() as name:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", name]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT, cwd=name)
        except (subprocess.SubprocessError, OSError) as error:
            raise ValueError(f"npm could not fetch {PACKAGE} {VERSION}: {otherwise}") from error
        (archive,) = Path(name).glob("*.tgz")
        with tarfile.open(archive) as package:
            members = {member.name: member for member in package if member.isfile()}
            for file, path in files.items():
                member = members.get(f"package/dist/{file}")
                reader = None if member is None else package.extractfile(member)
                content = b"" if reader is None else reader.read()
                if hashlib.sha256(content).hexdigest() != SHA256[file]:
                    raise ValueError(
                        f"{file} from npm is not the file of {PACKAGE} {VERSION}: its SHA-256 differs"
                    )
                write_file(path, content)
