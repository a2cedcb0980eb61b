"""One of two processes that train named layers by FSDP2 and by DDP: `python tests/fully_sharded.py RANK FILE`.

The full state of FSDP2 has the names and the numbers of the layer, and loads again; DDP gives the mean gradient of
both. Rank 0 prints the names of the layers, in JSON.
"""

import json
import sys
import warnings

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.layers import COMPAT, LAYERS, drawn

ALL = {**LAYERS, **COMPAT}


def sharded(name: str, mesh: distributed.DeviceMesh) -> bool:
    """Whether it has a state, which goes there and back."""
    use = ALL[name]()
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


def replicated(name: str) -> bool:
    """Whether it has parameters, whose gradient is the mean of both processes."""
    use = ALL[name]()
    trained = {key: p for key, p in use.layer.named_parameters() if p.requires_grad}
    if not trained:
        return False
    y = use()
    expected = torch.autograd.grad(y.square().sum(), list(trained.values()), allow_unused=True)
    layer = DistributedDataParallel(use.layer, find_unused_parameters=True)
    actual = use.run(layer)
    torch.testing.assert_close(actual, y, msg=lambda text: f"{name}: {text}")
    (actual.square().sum() * (1 + distributed.get_rank())).backward()
    for (key, p), grad in zip(trained.items(), expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(p.grad, 1.5 * grad, msg=lambda text, key=key: f"{name}, {key}: {text}")
    return True


def main(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    checked = {"FSDP2": [name for name in drawn(ALL, 10) if sharded(name, mesh)],
               "DDP": [name for name in drawn(ALL, 10) if replicated(name)]}
    if rank == 0:
        print(json.dumps(checked))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
