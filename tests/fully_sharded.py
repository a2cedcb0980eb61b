"""One of two processes that share every named layer by FSDP2: `python tests/fully_sharded.py RANK FILE`.

Its full state has the names and the numbers of the layer, and loads again; rank 0 prints the names of the layers.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.layers import LAYERS


def check(name: str, mesh: distributed.DeviceMesh) -> bool:
    """Whether it has a state, which goes there and back."""
    use = LAYERS[name]()
    layer, expected = use.layer, use().detach()
    state = {key: t.clone() for key, t in layer.state_dict().items()}
    if not state:
        return False
    fully_shard(layer, mesh=mesh)
    torch.testing.assert_close(use().detach(), expected, msg=lambda text: f"{name}: {text}")
    gathered = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank() == 0:
        assert gathered.keys() == state.keys(), f"{name}: {gathered.keys() ^ state.keys()}"
        assert all(torch.equal(gathered[key], t) for key, t in state.items()), name
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    loaded = set_model_state_dict(layer, gathered, options=StateDictOptions(full_state_dict=True,
                                                                            broadcast_from_rank0=True))
    assert not loaded.missing_keys and not loaded.unexpected_keys, (name, loaded)
    torch.testing.assert_close(use().detach(), expected, msg=lambda text: f"{name}, loaded: {text}")
    return True


def main(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    checked = [name for name in LAYERS if check(name, mesh)]
    if rank == 0:
        print(*checked)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
