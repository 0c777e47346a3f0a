"""Parses names of devices: maker, chip, architecture, form factor, memory and power limit in any
order.

`NVIDIA H100 SXM5 80GB HBM3`, `8x 80GB H100-SXM` and `h100_sxm5_80gb` name one device;
`H100-SXM-96GB-HBM2e-500W` another with a power limit of 500 W; `v5litepod-256` is a slice of a TPU
v5e; `A100 40GB (AWS p4d.24xlarge)` also names a place. Every part that is named must be the
device's own: nothing is guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

MAKERS: Final[Mapping[str, str]] = {
    "nvidia": "NVIDIA",
    "tesla": "NVIDIA",
    "geforce": "NVIDIA",
    "quadro": "NVIDIA",
    "amd": "AMD",
    "instinct": "AMD",
    "radeon": "AMD",
    "intel": "Intel",
    "habana": "Intel",
    "huawei": "Huawei",
    "moore": "Moore Threads",
    "threads": "Moore Threads",
    "mthreads": "Moore Threads",
    "iluvatar": "Iluvatar",
    "corex": "Iluvatar",
    "metax": "MetaX",
    "kunlunxin": "Kunlunxin",
    "kunlun": "Kunlunxin",
    "hygon": "Hygon",
    "dcu": "Hygon",
    "cambricon": "Cambricon",
    "biren": "Biren",
    "enflame": "Enflame",
}
"""Makers of devices, by the words that name them or their product lines."""
_FILLER: Final = frozenset(
    {
        # Words for kinds of devices, and for where they are installed.
        "gpu",
        "gpus",
        "tensor",
        "core",
        "accelerator",
        "card",
        "cts",
        "hgx",
        "superchip",
        "apu",
        "grace",
        "pod",
        "podslice",
        "slice",
        "megacore",
        # Words for the meaning of a number beside them.
        "memory",
        "tdp",
        "tgp",
        "power",
        "limit",
        "limited",
        "cap",
        "capped",
        "at",
        "to",
        "with",
        "on",
        "in",
    }
)
"""Words that drivers and tables add to a name."""
PLACES: Final = frozenset(
    {
        # Clouds, also those of makers of chips: they host the chips of others too.
        "alibaba",
        "amazon",
        "aws",
        "azure",
        "cloud",
        "coreweave",
        "crusoe",
        "gcp",
        "google",
        "lambda",
        "microsoft",
        "nebius",
        "oci",
        "oracle",
        "runpod",
        # Supercomputers.
        "alps",
        "aurora",
        "eos",
        "frontier",
        "isambard",
        "jupiter",
        "juwels",
        "leonardo",
        "lumi",
        "marenostrum",
        "perlmutter",
        "polaris",
        "selene",
        "summit",
        "supercomputer",
    }
)
"""Words for places where devices stand, which say nothing of the device."""
ARCHITECTURES: Final[Mapping[str, str]] = {
    "pascal": "Pascal",
    "volta": "Volta",
    "turing": "Turing",
    "ampere": "Ampere",
    "lovelace": "Ada",
    "hopper": "Hopper",
    "blackwell": "Blackwell",
    "cdna1": "CDNA1",
    "cdna2": "CDNA2",
    "cdna3": "CDNA3",
    "cdna4": "CDNA4",
    "gfx90a": "CDNA2",
    "gfx942": "CDNA3",
    "gfx950": "CDNA4",
}
"""Architectures by the words that stand beside a chip's name."""
_SPELLINGS: Final = (
    # Trademarks, and counts and instance types around a name (`8x H100`, `p5.48xlarge`).
    (r"\((?:tm|r|c)\)|[\u2122\u00ae]", " "),
    (r"\b[a-z]+\d+[a-z]*\.\d*x?large\b", " "),
    # Instances of Azure (`Standard_ND96isr_H100_v5`), of Google (`a3-megagpu-8g`, `A3 Mega`), of
    # Oracle (`BM.GPU.H100.8`) and of Amazon without their size (`DL1`): the chip that they name
    # stays.
    (
        r"\b(?:standard[ _-])?n[cd]\d*[a-z]*[ _-]+((?:[a-z]+\d+[a-z]*[ _-]+)?)v\d\b",
        r" \1 ",
    ),
    (r"\ba[234][- ](?:mega|high|ultra)(?:gpu-\d+g)?\b|\bg2-standard-\d+\b", " "),
    (r"\b(?:bm|vm)\.gpu\d?\.((?:[a-z]+\d+[a-z]*)?)(?:-v\d)?(?:\.\d+)?\b", r" \1 "),
    (r"\bmarenostrum[- ]?\d\b", " "),
    (r"\b(?:dl1|p3dn|p4d|p4de|p5|p5e|p5en|p6)\b", " "),
    (r"(^|\() *\d+ ?[x\u00d7] ?(?=[a-z])", r"\1"),
    (r"\bai accelerators?\b|\bserver edition\b|\bultra (?=[bg]b?\d)", " "),
    # TPUs: the small chips are called `lite`, and a number behind the version is the size of a
    # slice.
    (r"\b(?:tpu[- ]?)?v(\d)[- ]?lite(?:[- ]?pod)?(?![a-z])", r"tpu-v\1e"),
    (
        r"\b(?:tpu[- ]?)?(v\d[epx]?|(?<=tpu)\dx)[- ]?(?:pod(?:slice)?[- ]?)?(?:-\d{1,5})(?!\d|[gw]|[- ]?g?i?b)",
        r"tpu-\1",
    ),
    (r"\btpu(?=v?\d)", "tpu-"),
    (r"pci-e", "pcie"),
)
"""Patterns in a lower-case name with their replacements, which are made before the name is divided
into words."""
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)-?g(?:i?b)?")
_POWER: Final = re.compile(r"(\d+(?:\.\d+)?)-?w(?:atts?)?")
_KIND_OF_MEMORY: Final = re.compile(r"hbm\d?e?|gddr\d+x?|lpddr\d+x?")
_FORM: Final = re.compile(r"sxm\d?|pcie|pci-e|nvl(?:72)?|oam")
_PLURAL: Final = re.compile(r"[a-z]+\d+00s")
"""Names of chips in the plural; `L40S` is a chip of its own."""
_APART: Final = re.compile(r"(?<=[a-z0-9])(?=(?:sxm|pcie)\d?(?![a-z]))|(?<=sxm\d)(?=\d{2,}g)")


@dataclass(frozen=True)
class DeviceWords:
    """Parts of a device's name; empty if absent."""

    chip: tuple[str, ...]
    """All other words, each divided between letters and digits, once and sorted."""
    makers: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()
    form: str = ""
    """`sxm`, `sxm5`, `pcie`, `nvl`, `nvl72` or `oam`."""
    memory_gb: float | None = None
    memory_kind: str = ""
    power_w: float | None = None
    is_of_dgx: bool = False
    """Whether the name says a DGX, whose devices are modules and never cards."""

    @property
    def part(self) -> "DeviceWords":
        """The words that identify a part: all except maker, architecture and power limit."""
        return replace(self, makers=frozenset(), architectures=frozenset(), power_w=None)


def device_words(name: str) -> DeviceWords:
    """Parts of a device's name."""
    # Some drivers write parts together (`h100sxm5`, `sxm480gb`): a blank is put where a form factor
    # begins or ends.
    text = name.lower()
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    text = _APART.sub("-", text)
    name_parts = [word for word in re.split(r"[\s_\-,/()\[\]@+]+", text) if word]
    # `80 GB` and `500 W` are one word each.
    joined: list[str] = []
    for word in name_parts:
        is_unit = word in ("gb", "gib", "g", "w", "watt", "watts")
        if is_unit and joined and re.fullmatch(r"\d+(?:\.\d+)?", joined[-1]):
            joined[-1] += word
        else:
            joined.append(word)
    chip: list[str] = []
    makers: set[str] = set()
    architectures: set[str] = set()
    is_of_dgx = False
    form = memory_kind = ""
    memory_gb = power_w = None
    for word in joined:
        power_limit = _POWER.fullmatch(word)
        memory_size = _MEMORY.fullmatch(word)
        if power_limit:
            power_w = float(power_limit[1])
        elif memory_size:
            memory_gb = float(memory_size[1])
        elif _KIND_OF_MEMORY.fullmatch(word):
            memory_kind = word
        elif _FORM.fullmatch(word):
            form = word
        elif word == "dgx":
            is_of_dgx = True
        elif word in MAKERS:
            makers.add(MAKERS[word])
        elif word in ARCHITECTURES:
            architectures.add(ARCHITECTURES[word])
        elif word not in _FILLER and word not in PLACES:
            # `RTX4090` and `RTX-4090` are one name. Several devices are written in the plural
            # (`H100s`).
            singular = re.sub(r"(?<=\d)s$", "", word) if _PLURAL.fullmatch(word) else word
            chip += re.findall(r"[a-z]+(?![a-z])|\d+[a-z]*|[^a-z\d]+", singular)
    return DeviceWords(
        chip=tuple(sorted(set(chip))),
        makers=frozenset(makers),
        architectures=frozenset(architectures),
        form=form,
        memory_gb=memory_gb,
        memory_kind=memory_kind,
        power_w=power_w,
        is_of_dgx=is_of_dgx,
    )


@dataclass(frozen=True)
class PartNames:
    """Parts of the names of one device of the catalog."""

    names: tuple[DeviceWords, ...]
    """Words of the device's name, and of each alias."""
    memory_gb: float
    """Memory according to its data sheet."""

    def fits(self, stated: DeviceWords) -> bool:
        """Whether the device matches all named parts."""
        # All words of one of its names must be there, and none that no name of it has. Other facts
        # must not contradict the device.
        chip_words = set(stated.chip)
        has_a_name = any(chip_words.issuperset(known.chip) for known in self.names if known.chip)
        if not has_a_name or chip_words.difference(*(known.chip for known in self.names)):
            return False
        sizes = {self.memory_gb} | {known.memory_gb for known in self.names}
        if stated.memory_gb is not None and stated.memory_gb not in sizes:
            return False
        kinds = {known.memory_kind for known in self.names} - {""}
        if stated.memory_kind and kinds and stated.memory_kind not in kinds:
            return False
        forms = {known.form for known in self.names} - {""}
        # `SXM` fits any generation of it. A device whose names contain no form factor is a PCIe
        # card or an OAM.
        forms = forms or {"pcie", "oam"}
        if stated.is_of_dgx and not any(form.startswith(("sxm", "nvl")) for form in forms):
            return False
        return not stated.form or any(form.startswith(stated.form) for form in forms)


def part_named(stated: DeviceWords, parts: Mapping[str, PartNames]) -> str | None:
    """The catalog name of the device that the words identify; None if there is none or several.

    Args:
        parts: parts of each device's names, by device name.
    """
    # An exact name wins. Else every part that fits is a candidate, and of several the chip's usual
    # one.
    for name, part in parts.items():
        if any(known.part == stated.part for known in part.names):
            return name
    fitting = [name for name, part in parts.items() if part.fits(stated)]
    if len(fitting) <= 1:
        return fitting[0] if fitting else None
    bare = DeviceWords(stated.chip)
    # The chip's bare name (`H100`) is an alias of its usual part.
    default_part = next((name for name, part in parts.items() if bare in part.names), None)
    if default_part in fitting:
        return default_part
    # If several devices have the stated memory, the one with the usual form factor and kind of
    # memory is meant.
    if default_part:
        form = next((known.form for known in parts[default_part].names if known.form), "")
    else:
        form = ""
    fitting_form = [
        name
        for name in fitting
        if form and parts[name].fits(DeviceWords(stated.chip, form=form[:3]))
    ]
    unmarked = []
    for name in fitting_form:
        if not any(known.memory_kind for known in parts[name].names):
            unmarked.append(name)
    return unmarked[0] if len(unmarked) == 1 else None
