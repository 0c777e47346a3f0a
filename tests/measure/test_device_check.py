import pytest

from perfmodel import catalog
from perfmodel.errors import CalibrationError
from perfmodel.measure.backends import check_device, same_device

FOUND = {
    "A100-SXM4-80GB": "NVIDIA A100-SXM4-80GB",
    "A100-SXM4-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-PCIE-80GB": "NVIDIA A100 80GB PCIe",
    "A10": "NVIDIA A10",
    "A10G": "NVIDIA A10G",
    "H100-SXM5-80GB": "NVIDIA H100 80GB HBM3",
    "H100-PCIE-80GB": "NVIDIA H100 PCIe",
    "H100-NVL-94GB": "NVIDIA H100 NVL",
    "H200-SXM-141GB": "NVIDIA H200",
    "L40S": "NVIDIA L40S",
    "RTX-4090": "NVIDIA GeForce RTX 4090",
    "RTX-2080Ti": "NVIDIA GeForce RTX 2080 Ti",
    "RTX-A6000": "NVIDIA RTX A6000",
    "T4": "Tesla T4",
    "V100-SXM2-16GB": "Tesla V100-SXM2-16GB",
    "MI300X": "AMD Instinct MI300X",
    "TPU-v4": "TPU v4",
    "TPU-v5e": "TPU v5 lite",
    "TPU-v5p": "TPU v5",
    "TPU-v6e": "TPU v6 lite",
}
"""Catalog names, and what drivers call the devices."""


@pytest.mark.parametrize("name", FOUND)
def test_each_name_means_its_own_device_and_no_other(name: str):
    assert catalog.device(name).name == name
    assert [other for other, found in FOUND.items() if same_device(name, found)] == [name]


def test_what_is_found_must_be_what_the_plan_names():
    check_device("H100", "NVIDIA H100 80GB HBM3")  # an alias
    check_device("my own chip", "NVIDIA A10")
    check_device("EPYC-Genoa-core", None)
    for planned, found in (
        ("A100", "NVIDIA H100 80GB HBM3"),
        ("A100", None),
        ("TPU-v4", None),
        ("EPYC-Genoa-core", "T4"),
    ):
        with pytest.raises(CalibrationError, match="any_device = true"):
            check_device(planned, found)
