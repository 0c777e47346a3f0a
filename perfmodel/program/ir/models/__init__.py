"""Model programs on one device, which the transforms of `perfmodel.program.distribute` distribute."""

from perfmodel.display import shorten_reprs
from perfmodel.program.ir._builder import ModelBuilder
from perfmodel.program.ir.models._catalog import mlp, mlp_inference, model_program
from perfmodel.program.ir.models._training import Adam, Sgd, training_step
from perfmodel.program.ir.models._transformer import (
    GPT2_175B,
    TransformerSize,
    cross_entropy,
    transformer_inference,
    transformer_loss,
)

shorten_reprs(__name__)
