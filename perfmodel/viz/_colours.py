"""One colour per kind of event in every picture."""

from perfmodel.program import Kind

# Okabe and Ito's colour-blind safe palette
COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#009E73",
    Kind.BACKWARD_INPUT: "#009E73",
    Kind.BACKWARD_WEIGHT: "#F0E442",
    Kind.SEND_FORWARD: "#999999",
    Kind.SEND_BACKWARD: "#999999",
    Kind.GRAD_REDUCE: "#D55E00",
    Kind.PARAM_GATHER: "#CC79A7",
    Kind.PARAM_GATHER_BACKWARD: "#CC79A7",
    Kind.EMBEDDING_REDUCE: "#E69F00",
    Kind.OPTIMIZER: "#0072B2",
    Kind.OFFLOAD: "#999999",
    Kind.RELOAD: "#999999",
}
