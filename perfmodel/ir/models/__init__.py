"""Model programs on one device, which the transforms of `perfmodel.distribute` distribute."""

from perfmodel.ir.models._draft import ModelDraft as ModelDraft
from perfmodel.ir.models._mlp import mlp as mlp
from perfmodel.ir.models._training import Adam as Adam
from perfmodel.ir.models._training import Sgd as Sgd
from perfmodel.ir.models._training import training_step as training_step
from perfmodel.ir.models._transformer import GPT2_175B as GPT2_175B
from perfmodel.ir.models._transformer import GPT2_XL as GPT2_XL
from perfmodel.ir.models._transformer import TransformerSize as TransformerSize
from perfmodel.ir.models._transformer import transformer_inference as transformer_inference
from perfmodel.ir.models._transformer import transformer_loss as transformer_loss
