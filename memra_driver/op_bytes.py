"""How many bytes each operation of a step must move: every input read once, every result written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache

F32 = 4


def op_bytes(target: Cache | CacheBatch, il: int, rows: int, *, in_round: bool = False) -> dict[str, int]:
    """Bytes of each operation of layer il in a step of `rows` at pos, over all sequences.

    attend reads the rows that its window shows; a borrower of K/V has no append. In a round conv and scan fill the
    tape as well, and the ring does not roll.
    """
    first, count = target.members[0], len(target.members)
    state = first.recur[il]
    if state is not None:
        x, gate = F32 * count * rows * state.conv_dim, F32 * count * rows * state.num_v
        vector, ring = gate * state.state_size, count * state.conv_state.nbytes
        weights, constants = F32 * state.conv_dim * state.d_conv, 2 * F32 * state.num_v
        both_states = 2 * count * state.ssm_state.nbytes
        return {
            "conv_update": 2 * x + weights + (ring + x if in_round else 2 * ring),
            "gdn_prep": x + 3 * vector + 4 * gate + constants,
            "gdn_scan": both_states + 4 * vector + 2 * gate + (3 * vector + 2 * gate if in_round else 0),
            "recur_step": x + 2 * ring + weights + 2 * gate + constants + both_states + vector,
        }
    layer = first.kv_layer_for(il)
    token = layer.k_tok_bytes + layer.v_tok_bytes
    begins = [max(0, member.pos - layer.window + 1) if layer.window else 0 for member in target.members]
    keys = sum(member.pos + rows - begin for member, begin in zip(target.members, begins, strict=True))
    heads = target.cfg.heads(il)
    queries = F32 * count * rows * heads * (layer.head_dim_k + layer.head_dim_v)
    costs = {"attend": keys * token + queries}
    if first.kv[il] is not None:
        costs["append_kv"] = count * rows * (F32 * (layer.kv_dim_k + layer.kv_dim_v) + token)
    return costs


def kept_bytes(target: Cache | CacheBatch, rows: int) -> int:
    """Bytes of the caches alone that a step of `rows` over the trunk must move.

    K/V rows that are seen and rows that are written, ring and state read and written: what any engine moves, however
    it fuses its operations.
    """
    total = 0
    for il in range(target.cfg.n_trunk):
        for member in target.members:
            state = member.recur[il]
            if state is not None:
                total += 2 * (state.conv_state.nbytes + state.ssm_state.nbytes)
                continue
            layer = member.kv_layer_for(il)
            seen = member.pos + rows - (max(0, member.pos - layer.window + 1) if layer.window else 0)
            written = rows if member.kv[il] is not None else 0
            total += (seen + written) * (layer.k_tok_bytes + layer.v_tok_bytes)
    return total
