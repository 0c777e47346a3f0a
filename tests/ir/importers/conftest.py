"""Modules compiled for eight fake devices, whose number must be set before JAX starts: another
process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_devices(tmp_path_factory):
    """Texts of the modules of `compile_on_fake_devices`, and XLA's count of FLOPs, by name."""
    folder = tmp_path_factory.mktemp("hlo")
    script = Path(__file__).parent / "compile_on_fake_devices.py"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # of what is compiled already XLA has no text
    }
    subprocess.run([sys.executable, script, folder], env=environment, check=True)
    texts = {path.stem: path.read_text() for path in folder.glob("*.hlo")}
    return texts, json.loads((folder / "flops.json").read_text())
