"""Model programs on one device, which the transforms of `perfmodel.program.distribute` distribute."""

from perfmodel.program.ir.models._catalog import model_program as model_program
from perfmodel.program.ir.models._mlp import mlp as mlp
from perfmodel.program.ir.models._mlp import mlp_inference as mlp_inference
from perfmodel.program.ir.models._model_builder import ModelBuilder as ModelBuilder
from perfmodel.program.ir.models._training import Adam as Adam
from perfmodel.program.ir.models._training import Sgd as Sgd
from perfmodel.program.ir.models._training import training_step as training_step
from perfmodel.program.ir.models._transformer import GPT2_175B as GPT2_175B
from perfmodel.program.ir.models._transformer import TransformerSize as TransformerSize
from perfmodel.program.ir.models._transformer import cross_entropy as cross_entropy
from perfmodel.program.ir.models._transformer import transformer_inference as transformer_inference
from perfmodel.program.ir.models._transformer import transformer_loss as transformer_loss
