"""Tokenizer of network descriptions: rates, counts, names, units, remarks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Token = tuple[str, re.Match[str]]
"""A kind of token and its place in the text."""

PCIE: Final = (
    r"\bpci(?:-?e|[- ]express)?(?:[- ]?(?:gen|g|v)?[- ]?(?P<pcie>\d)(?:\.\d)?)?(?:\s*x\d+)?(?!\w)"
)
"""The link from a device to its host, and its generation."""
_SECOND = r"(?:ps|PS|/[sS](?:ec(?:ond)?s?)?|\s+per\s+second)?"
_BITS = (
    rf"(?:(?:[MGTmgt]b(?:its?)?|(?i:[mgt]bits?)){_SECOND}"
    rf"|(?i:(?:mega|giga|tera)bits?){_SECOND}|[MGTmgt])(?![A-Za-z])"
)
_BYTES = rf"(?:[MGTmgt]i?B(?:ytes?)?{_SECOND}|(?i:(?:mega|giga|tera)bytes?){_SECOND})(?![A-Za-z])"
_ETHERNET_UNIT = r"(?:(?i:gbe|gige|gbase-?\w*)|GE)(?![A-Za-z])"
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
PREFIX_GBIT: Final = {"m": 1e-3, "g": 1.0, "t": 1e3}

_NODE = r"(?:compute\s+)?nodes?|servers?|hosts?|machines?|instances?|systems?|boxe?s?|vms?|chassis|trays?"
_DEVICE = r"gpus?|devices?|chips?|accelerators?|cards?|tpus?|npus?|hpus?|ranks?|gcds?|tiles?|modules?|oams?"
_ADAPTER = r"ports?|nics?|hcas?|adapters?|links?|rails?|connections?|cables?|lanes?"
NUMBER_WORDS: Final = {
    "one": 1,
    "single": 1,
    "two": 2,
    "dual": 2,
    "three": 3,
    "four": 4,
    "quad": 4,
    "six": 6,
    "eight": 8,
    "sixteen": 16,
}


@dataclass(frozen=True)
class Part:
    """A network adapter that is named by its model number."""

    gbit_per_s: float
    """Rate of its fastest port."""
    family: str = ""
    """Network that it is made for; empty if its ports run InfiniBand and Ethernet."""


PARTS: Final = {
    # NVIDIA's, by the names of the PCI ID repository.
    r"mt27700": Part(100),
    r"mt27710": Part(50),
    r"mt27800": Part(100),
    r"mt28800": Part(100),
    r"mt28908": Part(200),
    r"mt2892": Part(200),
    r"mt2894": Part(50),
    r"mt2910": Part(400),
    r"mt42822": Part(200),
    r"mt43244": Part(400),
    # Broadcom's and AMD's, for RDMA over Ethernet.
    r"bcm574\d\d": Part(25, "Ethernet"),
    r"bcm5750[48]": Part(200, "RoCE"),
    r"bcm57608": Part(400, "RoCE"),
    r"thor[- ]?2": Part(400, "RoCE"),
    r"pollara(?:[- ]?400)?": Part(400, "RoCE"),
    r"vulcano": Part(800, "RoCE"),
    # Intel's.
    r"i210": Part(1, "Ethernet"),
    r"i350": Part(1, "Ethernet"),
    r"x540": Part(10, "Ethernet"),
    r"x550t?": Part(10, "Ethernet"),
    r"x710": Part(10, "Ethernet"),
    r"x722": Part(10, "Ethernet"),
    r"xxv710": Part(25, "Ethernet"),
    r"xl710": Part(40, "Ethernet"),
    r"e810": Part(100, "Ethernet"),
    r"e830": Part(200, "Ethernet"),
}
"""Adapters by patterns of their model numbers (data sheets of their makers)."""


def part_named(number: str) -> Part:
    """The adapter with a model number that the grammar knows."""
    return next(
        part for pattern, part in PARTS.items() if re.fullmatch(pattern, number, re.IGNORECASE)
    )


_TOKENS: Final = (
    # Remarks first: an instance type (p5.48xlarge) has numbers and letters that look like rates and
    # counts.
    (
        "remark",
        r"(?i)\b[a-z]+\d+[a-z]*(?:-\w+)?\.\d*x?large\b|\ba3[- ]?(?:mega|ultra|high|edge)(?:gpu)?(?:-\d+g)?\b"
        r"|\brail[- ]?optimi[sz]ed\b",
    ),
    (
        "nothing",
        r"(?i)\bn/a\b|\b(?:rate )?not (?:stated|known|given)\b|\bunknown\b|\bsee [\w ]+|-(?=\s|$)",
    ),
    # Links within a node, which stand beside the network's words and are none of them.
    ("domain", r"(?i)\bnvl-?\d+\b"),
    (
        "scale_up",
        r"(?i)\bnv-?link(?:[- ]?\d)?\b|\bnv-?switch\b|\bnvl\b|\bxgmi\b|\binfinity fabric\b|\bua-?link\b"
        r"|\bneuron-?link\b|\bhccs\b|\bxe[- ]?link\b|\bici\b|\bc2c\b|\bnv\d{1,2}\b|\bsli\b|\bocs\b"
        r"|\binter-?chip interconnect\b",
    ),
    ("host", rf"(?i){PCIE}"),
    # Rates, before names and counts: `100GbE` is one, and `200G` is not a count.
    (
        "rate",
        rf"(?P<number>{_NUMBER})\s*-?\s*(?:(?P<ethernet>{_ETHERNET_UNIT})|(?P<bytes>{_BYTES})|(?P<bits>{_BITS}))",
    ),
    # Names, from those that say most: a generation or an adapter tells a rate too.
    ("bare", r"(?i)\bgig(?:a(?:bit)?)?[- ]?ethernet\b|\bgigabit\b"),
    ("generation", r"(?i)\b(?P<generation>[sdqfehnxg]dr)(?:-?(?P<lane>\d{2,3}))?(?![\w])"),
    ("quantum", r"(?i)\bquantum(?:[- ]?(?P<quantum>x800|[23])(?!\s*[x\u00d7*]\s*\d))?\b"),
    (
        "adapter",
        r"(?i)\b(?:connect-?x|cx|mcx)[- ]?(?P<connectx>\d)(?:[- ]?(?P<lx>lx)|[- ]?(?:dx|ex|vpi))?\b"
        r"|\b(?:blue-?field|bf)[- ]?(?P<bluefield>\d)\b",
    ),
    (
        "part",
        rf"(?i)\b(?P<part>{'|'.join(sorted(PARTS, key=len, reverse=True))})(?:-[a-z]\w*|-\d)?(?!\w)",
    ),
    (
        "roce",
        r"(?i)\bro-?ce(?:[- ]?v\d|\d)?\b|\bultra[- ]?ethernet\b|\buec\b"
        r"|\bspectrum(?:-?x|-?\d)?(?![\w])|\brdma over converged ethernet\b",
    ),
    ("efa", r"(?i)\bef[a](?:[- ]?v(?P<efa>\d))?(?![\w])|\belastic fabric adapters?\b"),
    (
        "slingshot",
        r"(?i)\bslingshot(?:[- ]?(?P<slingshot>400|10|11)(?!\s*[x\u00d7*]))?\b|\bcassini\b",
    ),
    ("infiniband", r"(?i)\binfini-?band\b|\biba?\b"),
    ("omni_path", r"(?i)\bomni-?path\b|\bopa\b"),
    ("aries", r"(?i)\baries\b"),
    ("tcpxo", r"(?i)\b(?:gpu-?direct[- ])?tcpxo\b|\bfas-?trak\b"),
    ("tcpx", r"(?i)\b(?:gpu-?direct[- ])?tcpx\b"),
    ("dcn", r"(?i)\bdcn\b|\bdata-?\s?cent(?:er|re) network\b"),
    ("ethernet", r"(?i)\bethernet\b|\bgvnic\b|\btcp(?:/ip)?\b|\biwarp\b"),
    ("rdma", r"(?i)\brdma\b|\bfalcon\b"),
    # Counts, what figures are per, and remarks on them.
    ("count", rf"(?P<count>\d+)\s*(?:(?i:{_ADAPTER})\s*)?[xX\u00d7*]"),
    ("count", r"(?<![A-Za-z0-9])[xX\u00d7*]\s*(?P<times>\d{1,2})(?![\w.])"),
    ("count", rf"(?i)\b(?P<word>{'|'.join(NUMBER_WORDS)})(?![a-z])"),
    ("per_node", rf"(?i)(?:\b(?:per|each|every)\s+|/\s*)(?:{_NODE})(?![a-z])"),
    ("per_rack", r"(?i)(?:\b(?:per|each|every)\s+|/\s*)(?:racks?|domains?|pods?)(?![a-z])"),
    ("per_device", rf"(?i)(?:\b(?:per|each|every)\s+|/\s*)(?:{_DEVICE})(?![a-z])"),
    (
        "per_adapter",
        rf"(?i)(?:\b(?:per|each|every)\s+|/\s*)(?:{_ADAPTER})(?![a-z])|\beach\b|\bapiece\b",
    ),
    ("total", r"(?i)\b(?:in )?total\b|\baggregated?\b|\baltogether\b"),
    ("both_ways", r"(?i)\bbi-?directional(?:ly)?\b|\bbidir\b|\bboth (?:ways|directions)\b"),
    ("noun", rf"(?i)\b(?:{_ADAPTER})(?![a-z])"),
    # The rest: bare numbers, and words without a meaning here.
    ("number", rf"(?<![\w.])(?:{_NUMBER})(?![\w.])"),
    (
        "filler",
        r"(?i)\b(?:a|an|the|with|of|in|on|at|for|from|to|via|over|by|up|around|about|approx(?:imately)?|roughly"
        r"|between|across|all|its|is|are|using|nvidia|mellanox|intel|hpe|cray|aws|amazon|google|broadcom|amd"
        r"|arista|cisco|network(?:ing|s)?|fabrics?|interconnects?|cluster|bandwidth|speed|switch(?:es|ed)?"
        r"|controllers?|family|dpus?|netxtreme(?:-?e)?|pensando|titanium|ai|ml|smart-?nics?|supernics?|rail-?optimi[sz]ed|non-?blocking|fat-?tree|clos"
        r"|dragonfly|torus|unidirectional|one way|each way|per direction|full[- ]duplex|inter|intra|linked"
        rf"|connect(?:ed|ing)?|measured|nominal|configs?|data|{_NODE}|{_DEVICE}|racks?|slices?|pods?)(?![a-z])",
    ),
)
"""Kinds of tokens in the order in which they are tried at each place of a text."""
_LEXER: Final = [(kind, re.compile(pattern)) for kind, pattern in _TOKENS]
_WORD: Final = re.compile(r"[^\s,;()\[\]/+]*\w[^\s,;()\[\]/+]*")

REMARKS: Final = frozenset(
    {"remark", "nothing", "noun", "number", "filler", "unknown", "host", "scale_up"}
)
"""Kinds of tokens that carry no information by themselves."""


def tokens_of(text: str) -> Iterator[Token]:
    """Tokens of a text; words of no other kind are of kind `unknown`."""
    position = 0
    while position < len(text):
        token = _token_at(text, position)
        if token is None:
            position += 1
        else:
            yield token
            position = token[1].end()


def _token_at(text: str, position: int) -> Token | None:
    """The token that begins at a place of a text, None for spaces and punctuation."""
    # Kinds are tried in order, and the first that matches counts: `200 Gb/s` is
    # a rate before it is a number, and `RoCE v2` a name before `v2` is unknown.
    is_punctuation = text[position].isspace() or text[position] in ",;:()[]/.-&"
    for kind, pattern in _LEXER:
        if is_punctuation and not kind.startswith("per_"):  # `/node`
            continue
        match = pattern.match(text, position)
        if match is not None and match.end() > position:
            return kind, match
    unknown = None if is_punctuation else _WORD.match(text, position)
    return None if unknown is None else ("unknown", unknown)


def without_brackets(text: str) -> str:
    """The text without brackets: figures and names in brackets are kept, remarks removed."""

    def opened(match: re.Match[str]) -> str:
        # `(4x 400 Gb/s per node)` tells figures, `(see appendix)` does not. Commas inside divide no
        # clauses.
        inside = match[1]
        says_something = {kind for kind, _ in tokens_of(inside)} - REMARKS
        return f" {inside.replace(',', ' ')} " if says_something else " "

    return re.sub(r"[(\[]([^()\[\]]*)[)\]]", opened, text)


# --- links within a node
# -------------------------------------------------------------------------------

_SCALE_UP_MAKERS: Final = (
    (r"nv-?link|nv-?switch|\bnvl-?\d", "NVIDIA"),
    (r"xgmi|infinity", "AMD"),
    (r"\bici\b", "Google"),
    (r"neuron-?link", "Amazon"),
    (r"\bhccs\b", "Huawei"),
    (r"xe[- ]?link", "Intel"),
)
"""Words for links within a node that only one maker's devices have."""
_LINK_FILLER: Final = re.compile(
    r"(?i)gen\w*|(?:\d+(?:st|nd|rd|th)|first|second|third|fourth|fifth)(?:-?gen(?:eration)?)?|v?\d(?:\.\d)?|hybrid|cube|mesh|bridges?|\d-way|way|dgx|hgx|pairs?|rack|none"
    r"|links?|and|scale-?up|full(?:y)?|assumed|simulator|sxm\d?|baseboard|ubb|if|[23]d|all-to-all"
    r"|[hbav]\d{2,3}|g[bh]\d00|mi\d{3}\w?|phb|pix|pxb|sys"
)


_PCIE_WORDS: Final = re.compile(rf"(?i){PCIE}|\b(?:phb|pix|pxb|sys)\b")
"""PCIe by its spellings, and by the words of `nvidia-smi topo -m` for the ways over it."""


def pcie_generation(text: str) -> int | None:
    """The generation of the PCIe that words for links inside a node name; 0 if they name none, None
    without PCIe."""
    match = _PCIE_WORDS.search(text)
    return None if match is None else int(match["pcie"] or 0)


def makers_of_links(text: str) -> set[str]:
    """Makers of devices with the named links inside a node."""
    return {maker for pattern, maker in _SCALE_UP_MAKERS if re.search(pattern, text.lower())}


def rack_size(text: str) -> int:
    """Number of devices in a named NVLink rack, such as 72 for `NVL72`; 0 if none is named."""
    return max((int(size) for size in re.findall(r"(?i)\bnvl-?(\d+)\b", text)), default=0)


def unread_link_words(text: str) -> tuple[str, ...]:
    """Words about links inside a node that cannot be read."""
    # Words for links inside a node share the grammar of networks, with some words of their own.
    unknown = [match[0] for kind, match in tokens_of(without_brackets(text)) if kind == "unknown"]
    return tuple(dict.fromkeys(word for word in unknown if not _LINK_FILLER.fullmatch(word)))
