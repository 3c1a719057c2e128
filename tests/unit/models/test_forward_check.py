"""The check of an architecture with one layer of each type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.model_families import FAMILIES, build_family
from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.core.errors import UserError
from tidemill.models import forward_check
from tidemill.models.auto import build_on_meta
from tidemill.models.forward_check import check_layers, keep_one_of_each_layer

WINDOWS = ["sliding_attention", "full_attention"]
# The layers whose types differ: by attention, by experts, by both, by position encoding.
KEPT: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "equal layers": ("llama", {}, [0]),
    "windows": ("gemma3_text", FAMILIES["gemma3_text"], [0, 1]),
    "windows from a layer on": ("qwen2", FAMILIES["qwen2"], [0, 2]),
    "a dense layer first": ("glm4_moe", FAMILIES["glm4_moe"], [0, 1]),
    "windows, and a dense layer first": ("afmoe", FAMILIES["afmoe"], [0, 1, 2]),
    "every second layer has experts": ("qwen3_moe", {**FAMILIES["qwen3_moe"], "decoder_sparse_step": 2}, [0, 1]),
    "without rotary embedding": (
        "smollm3",
        {**FAMILIES["smollm3"], "no_rope_layers": [1, 1, 0, 1]},
        [0, 2],
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_one_layer_of_each_type_is_kept(case: str, tmp_path: Path) -> None:
    family, fields, kept = KEPT[case]
    folder = save_folder(build_family(family, fields), tmp_path / "m")
    whole, model = (build_on_meta(folder) for _ in range(2))
    keep_one_of_each_layer(model)
    names = {name for name, _ in whole.named_parameters()}
    # Names of the kept layers, renumbered.
    expected = {name for name in names if ".layers." not in name}
    for position, index in enumerate(kept):
        expected |= {name.replace(f".{index}.", f".{position}.", 1) for name in names if f".layers.{index}." in name}
    assert {name for name, _ in model.named_parameters()} == expected
    config = model.config.get_text_config()
    assert config.num_hidden_layers == len(kept)
    types = getattr(whole.config.get_text_config(), "layer_types", None)
    if types:
        assert config.layer_types == [types[index] for index in kept]
    check_layers(folder)


def test_a_layer_type_that_mixes_packed_sequences_is_found_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Neighbours(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.mlp(states + states.roll(1, 1))
            return out

    folder = save_folder(llama(layers=5), tmp_path / "m")

    def with_one(folder: Path) -> PreTrainedModel:
        model: Any = build_on_meta(folder)
        model.model.layers[3].mlp = Neighbours(model.model.layers[3].mlp)
        built: PreTrainedModel = model
        return built

    check_layers(folder)
    monkeypatch.setattr(forward_check, "build_on_meta", with_one)
    with pytest.raises(UserError, match="computes other logits when sequences are packed") as refused:
        check_layers(folder)
    assert refused.value.where == str(folder)


def test_memory_is_that_of_one_layer_and_the_embeddings(tmp_path: Path) -> None:
    """Ten layers of 50 MB; one of them and the embedding of 2 MB are allocated."""
    folder = save_folder(llama(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_hidden_layers": 10, "hidden_size": 1024, "intermediate_size": 3072, "num_key_value_heads": 4}
    config |= sizes | {"vocab_size": 512, "head_dim": 256, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    code = (
        "from pathlib import Path; from tidemill.models.forward_check import check_layers\n"
        "def status(key): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(key))\n"
        f"before = status('VmRSS'); check_layers(Path({str(folder)!r})); print(status('VmHWM') - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    layer = 4 * (4 * 1024 * 1024 + 3 * 1024 * 3072)
    assert int(done.stdout) * 1024 < 2.5 * layer
