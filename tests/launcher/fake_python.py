"""What a fake interpreter of these tests does: run as `fake_python.py CONFIG ARGUMENT ...`.

The launcher's questions (`-c CODE`) are really executed, under the version and with the modules
that CONFIG gives. Installing is played, and whatever the launcher finally starts is written down.
CONFIG: {"version": [3, 12, 1], "lacks": [module, ...], "has": {module: version}, "install":
"works" | "fails" | "hangs"}, beside it the log.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

config_path = Path(sys.argv[1])
config = json.loads(config_path.read_text())
arguments = sys.argv[2:]
me = str(config_path).removesuffix(".json")


def answer(code: str, words: list[str]) -> None:
    def find_spec(module: str) -> SimpleNamespace | None:
        return None if module in config["lacks"] else SimpleNamespace(origin=f"/{module}.py")

    def version(distribution: str) -> str:
        return config["has"].get(distribution, "9999.0")

    importlib.util.find_spec = find_spec
    importlib.metadata.version = version
    sys.version_info = tuple(config["version"])
    sys.executable = me
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


def install() -> int:
    if config["install"] == "hangs":
        Path(me + ".hanging").touch()
        time.sleep(60)
    if config["install"] == "fails":
        print("no such version")
        return 1
    config_path.write_text(json.dumps(config | {"lacks": []}))
    return 0


def make_venv(folder: Path) -> None:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(Path(me).read_text())
    python.chmod(0o755)
    everything = ["jax", "torch", "numpy", "pytest"]
    Path(f"{python}.json").write_text(json.dumps(config | {"lacks": everything}))


if arguments[0] == "-c":
    answer(arguments[1], arguments[2:])
    sys.exit(0)
with open(os.environ["FAKE_LOG"], "a") as log:
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    entry = {"python": me, "arguments": arguments, "cwd": os.getcwd(), "environment": kept}
    log.write(json.dumps(entry) + "\n")
match arguments:
    case ["-m", "uv", *_]:
        sys.exit("No module named uv")
    case ["-m", "venv", folder]:
        make_venv(Path(folder))
    case ["-m", "pip", "install", *_]:
        sys.exit(install())
    case ["from-uv", "venv", *_, folder]:
        make_venv(Path(folder))
    case ["from-uv", "pip", "install", "--python", python, *_]:
        sys.exit(subprocess.run([python, "-m", "pip", "install"]).returncode)
