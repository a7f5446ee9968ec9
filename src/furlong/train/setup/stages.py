"""The stages of a run's pipeline."""

from __future__ import annotations

from typing import Any

from furlong.config.schema import RunConfig
from furlong.data.dataset import DataSet
from furlong.errors import ConfigError, UserError
from furlong.models.build import read_config
from furlong.models.describe import describe
from furlong.models.folder import check_folder
from furlong.plan.plan import Layout
from furlong.planners.layouts import cut_layers, mean_attended_keys
from furlong.planners.orders import stage_heights


def stages_of_run(
    config: RunConfig, train: DataSet, layout: Layout, *, rope: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """Layers of each stage, so that all take about as long over the data's lengths; of equal
    height where the model's work cannot be counted; empty without a pipeline.

    Raises ConfigError for fewer layers than stages.
    """
    if layout.pp == 1:
        return ()
    limit = config.data.max_seq_len
    whole = read_config(check_folder(config.model.name), rope=rope, max_seq_len=limit)
    num_layers = int(whole.get_text_config().num_hidden_layers)
    if layout.pp > num_layers:
        raise ConfigError(
            given=f"parallel.pp = {layout.pp} for a model of {num_layers} layers",
            required=f"at most {num_layers}: a stage has a layer at least",
            source=f"parallel.pp, and {config.model.name}, config.json",
            change=f"set parallel.pp to {num_layers} or less",
        )
    try:
        shape = describe(whole)
    except UserError:
        return stage_heights(num_layers, -(-num_layers // layout.pp))
    return cut_layers(shape, layout.pp, mean_attended_keys(train.seq_lens.tolist()))
