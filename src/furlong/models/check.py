"""What can be said of a model by its config alone, before weights are loaded or data are read."""

from __future__ import annotations

from typing import Any

import torch

from furlong.models.build import model_of_config, read_config
from furlong.models.causal_lm import CausalLM
from furlong.models.folder import check_folder


def check_model(name: str, *, rope: dict[str, Any] | None = None, max_seq_len: int) -> None:
    """Raise UserError for a hub id or folder whose model cannot be trained at this length.

    The model is built without memory for its weights. What its forward does is only known to the
    self-check of the engine.
    """
    source = check_folder(name)
    config = read_config(source, rope=rope, max_seq_len=max_seq_len)
    with torch.device("meta"):
        model = model_of_config(config, source, dtype=torch.float32)
    CausalLM(model.train(), max_seq_len=max_seq_len)
