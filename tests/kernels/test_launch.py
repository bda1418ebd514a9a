"""Kernels can be turned off, compile without a GPU, and are loaded one thread at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kronbit.kernels import guard

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.bf16_products,
]


def test_the_environment_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONBIT_KERNELS", "0")
    device = torch.device("cuda", 7)
    assert guard.why_not.__wrapped__(device) == "KRONBIT_KERNELS=0"
    monkeypatch.delenv("KRONBIT_KERNELS")
    assert guard.why_not.__wrapped__(torch.device("cpu")) == "no kernels for cpu"


def test_kernels_are_compiled_and_loaded_before_they_are_launched() -> None:
    """A kernel that cannot be loaded does not stop the others. It fails when it is launched.

    CPython may fail to parse a kernel while another thread parses. The kernel is then
    compiled again.
    """
    from kronbit.kernels.launch import compile_together, launch

    class Kernel:
        def __init__(self, fits: bool) -> None:
            self.fits, self.loaded, self.calls = fits, False, 0
            self.src = SimpleNamespace(signature={"x": "*fp32"})

        def warmup(self, *arguments: object, grid: tuple[int, ...]) -> Kernel:
            self.calls += 1
            if self.calls == 1:
                raise SystemError("AST constructor recursion depth mismatch (before=48, after=89)")
            return self

        @property
        def run(self) -> object:
            self.loaded = True
            if not self.fits:
                raise RuntimeError("out of resources")
            return object()

    some = [Kernel(True), Kernel(False), Kernel(True)]

    def work() -> None:
        for kernel in some:
            launch(kernel, (1,), torch.zeros(1))

    compile_together(work)
    assert all(kernel.loaded for kernel in some)


_TWO_BUILDERS = """
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from kronbit.kernels.launch import load

class Compiled:
    def __init__(self, pointer):
        self.src = SimpleNamespace(signature={"x": pointer, "n": "i32", "N": "constexpr"})
    @property
    def run(self):
        mark = Path(sys.argv[1])
        mark.touch(exist_ok=False)  # fails if another thread or process is building
        time.sleep(0.02)
        mark.unlink()

failed = []
def build():
    try:
        for pointer in ("*fp32", "*i8") * 8:  # one library
            load(Compiled(pointer))
    except FileExistsError as error:
        failed.append(error)

threads = [threading.Thread(target=build) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(bool(failed))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_one_thread_at_a_time_builds_the_launcher_of_a_signature(tmp_path: Path) -> None:
    """Concurrent builders would load each other's libraries, whose signatures differ."""
    command = [sys.executable, "-c", _TWO_BUILDERS, str(tmp_path / "building")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    (lock,) = (tmp_path / "cache").iterdir()
    assert lock.stat().st_size == 0


def test_threads_never_get_the_launcher_of_another_signature() -> None:
    """Python keeps one module object for all launchers, because they have the same name."""
    from kronbit.kernels.launch import load

    module = SimpleNamespace(launch="")

    class Compiled:
        """Loads its launcher as Triton does: into the common module, from which it is read."""

        launch = ""

        def __init__(self, signature: str) -> None:
            self.src = SimpleNamespace(signature={"x": signature})

        @property
        def run(self) -> None:
            module.launch = self.src.signature["x"]
            time.sleep(0.001)
            self.launch = module.launch

    loaded = [Compiled(signature) for signature in ("*fp32", "i32", "i64", "fp32") * 8]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(load, loaded))
    assert all(compiled.launch == compiled.src.signature["x"] for compiled in loaded)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_every_kernel_compiles_without_a_gpu() -> None:
    """The compiler refuses some programs that the interpreter accepts."""
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass_kernel" in done.stdout
    assert "wgmma" in done.stdout
