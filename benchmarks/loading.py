"""Host memory of four ranks (FSDP2, gloo) while they load a model: each its rows, or the whole model and then its rows.

    python -m benchmarks.loading

A Llama of 700 million random weights in four bf16 files; the rows of its vocabulary cannot be divided evenly. A rank's
part is its rows in fp32. Reported: the peak resident memory of a rank above what it had after its imports, over its
part; and seconds until all ranks have loaded. Ranks that load the whole model do so in turn, to fit into 8 GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.measuring import print_records, write_result
from benchmarks.models import char_model, quiet
from benchmarks.origin import parsed
from benchmarks.shards import DEADLINE_S
from benchmarks.stopping import interruptible
from benchmarks.subjects import check_equal
from benchmarks.turns import ONE_THREAD

Way = Literal["rows", "whole"]
SIZE, FILES = 4, 4
PEAK_AIM = 1.2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "num_hidden_layers": 20,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 49_157,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    os.environ |= ONE_THREAD
    quiet()
    with tempfile.TemporaryDirectory(prefix="tidemill-loading-") as folder:
        write_model(Path(folder))
        ways: dict[Way, list[dict[str, Any]]] = {"rows": _measured(Path(folder), "rows")}
        ways["whole"] = _measured(Path(folder), "whole")
    check_equal("weights", {way: [rank["digest"] for rank in ranks] for way, ranks in ways.items()})
    check_equal("parts", {way: [rank["part_bytes"] for rank in ranks] for way, ranks in ways.items()})
    rows = [
        {
            "loads": way,
            "part_bytes": max(rank["part_bytes"] for rank in ranks),
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
            "peak_over_part": max(rank["peak_bytes"] / rank["part_bytes"] for rank in ranks),
            "seconds": max(rank["seconds"] for rank in ranks),
        }
        for way, ranks in ways.items()
    ]
    reached = rows[0]["peak_over_part"] <= PEAK_AIM
    print_records(f"{SIZE} ranks load {ways['rows'][0]['parameters'] / 1e6:.0f}M parameters", rows)
    figures = {"ranks": SIZE, "parameters": ways["rows"][0]["parameters"], "ways": rows}
    write_result("loading", {"figures": figures, "reached": {"peak": reached}})
    return 0 if reached else 1


def write_model(folder: Path) -> None:
    """Configuration, tokenizer and random weights in `FILES` files."""
    import torch
    from safetensors.torch import save_file

    from tidemill.models.auto import build_on_meta

    for path in char_model().glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {name: parameter.shape for name, parameter in build_on_meta(folder).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        names = list(shapes)[number::FILES]
        tensors = {name: torch.randn(shapes[name], generator=generator).bfloat16() for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _measured(folder: Path, way: Way) -> list[dict[str, Any]]:
    """The figures of every rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        pipes, processes = [], []
        for index in range(SIZE):
            ours, theirs = context.Pipe()
            arguments = (Path(meeting) / "meeting", folder, index, way, theirs)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        try:
            for pipe in pipes:
                if not pipe.poll(DEADLINE_S):
                    raise RuntimeError(f"a rank was silent for {DEADLINE_S:.0f} s")
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(meeting: Path, folder: Path, index: int, way: Way, pipe: Connection) -> None:
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 - imported before the memory is measured

    from tidemill.models.loading import load_model, unloaded_model
    from tidemill.models.ranks import local_rows
    from tidemill.models.tree_forward import TreeForward
    from tidemill.models.weights_digest import weights_digest
    from tidemill.trainer.sharding import join_ranks, load_shards, shard

    torch.set_num_threads(1)
    quiet()
    device = torch.device("cpu")
    ranks = join_ranks(meeting, size=SIZE, index=index, device=device, timeout_s=DEADLINE_S, one_machine=True)
    ranks.barrier()
    before = _reset_peak()
    started = time.perf_counter()
    if way == "rows":
        forward = TreeForward(unloaded_model(folder), device=device)
        load_shards(forward, folder, ranks)
    for turn in range(SIZE if way == "whole" else 0):
        if turn == index:
            forward = TreeForward(load_model(folder, device=device))
            shard(forward, ranks)
        ranks.barrier()
    seconds, peak = time.perf_counter() - started, _status("VmHWM")
    figures = {
        "peak_bytes": peak - before,
        "part_bytes": sum(local_rows(parameter)[0].nbytes for parameter in forward.parameters()),
        "parameters": sum(parameter.numel() for parameter in forward.parameters()),
        "seconds": seconds,
        "digest": weights_digest(forward.model, ranks),
    }
    pipe.send(figures)
    pipe.poll(None)  # until it is killed: a connection that closes would end a rank that is slower


def _reset_peak() -> int:
    """Start a new peak of the resident memory; returns the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """A size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


if __name__ == "__main__":
    sys.exit(interruptible(main))
