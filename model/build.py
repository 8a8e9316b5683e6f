"""From a configuration to a network."""

from torch import Tensor

from model.backbone import Backbone
from model.bert4rec import BERT4Rec
from model.config import ModelConfig
from model.hstu import HSTU
from model.sasrec import SASRec

BACKBONES: dict[str, type[Backbone]] = {"sasrec": SASRec, "bert4rec": BERT4Rec, "hstu": HSTU}


def build_model(config: ModelConfig, training_counts: Tensor) -> Backbone:
    """The backbone that the configuration names, initialised from torch's random state.

    Args:
        config: hyper-parameters.
        training_counts: (N,) uses of each catalogue item in training.
    """
    return BACKBONES[config.backbone](config, training_counts)
