"""The cache programs of a kit: what engines do with a cache, and what it refuses them.

A token's inputs are drawn from its number and the layer, so a token that is run again has the same bits. Programs that
end with the same tokens as another say so: both must have the same digest, on one and the same implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.formats import FormatPolicy
from memra_driver.kit.files import Array, Entry
from memra_driver.kit.plans import args_json
from memra_driver.plan import CacheOptions

Tokens = Sequence[int]


@dataclass
class Program:
    """A list of calls on a cache of `cfg`, each with its inputs."""

    title: str
    cfg: ModelConfig
    max_ctx: int
    policy: FormatPolicy = field(default_factory=FormatPolicy)
    options: CacheOptions = field(default_factory=CacheOptions)
    exact: bool = False
    same_as: str | None = None
    steps: list[tuple[Entry, dict[str, Array]]] = field(default_factory=list)

    @property
    def args(self) -> Entry:
        """As the manifest has them."""
        return args_json(self.cfg, self.max_ctx, self.policy, self.options) | {"exact": self.exact}

    def call(self, op: str, inputs: dict[str, Array] | None = None, **args: Any) -> None:
        self.steps.append(({"op": op} | args, inputs or {}))

    # What a layer takes for some tokens.

    def _draw(self, tokens: Tokens, il: int, name: str, *shape: int) -> Array:
        seed = sum(map(ord, name))
        rows = [np.random.default_rng([seed, il, token]).standard_normal(shape, np.float32) for token in tokens]
        return np.stack(rows) if rows else np.zeros((0, *shape), np.float32)

    def append(self, tokens: Tokens, il: int) -> None:
        dims = [self.cfg.kv_heads(il) * dim for dim in self.cfg.head_dims(il)]
        rows = {f"{side}_rows": self._draw(tokens, il, side, dim) for side, dim in zip("kv", dims, strict=True)}
        self.call("append_kv", rows, layer=il)

    def attend(self, tokens: Tokens, il: int, window: int | None = None) -> None:
        q = self._draw(tokens, il, "query", self.cfg.heads(il), self.cfg.head_dims(il)[0])
        self.call("attend", {"q": q}, layer=il, scale=0.125, window=window)

    def conv(self, tokens: Tokens, il: int) -> None:
        ssm = self._ssm
        weights = np.random.default_rng([il]).standard_normal((ssm.conv_dim, ssm.conv_kernel), np.float32)
        self.call("conv_update", {"x": self._draw(tokens, il, "x", ssm.conv_dim), "w": weights}, layer=il)

    def scan(self, tokens: Tokens, il: int) -> None:
        heads, size = self._ssm.time_step_rank, self._ssm.state_size
        inputs = {name: self._draw(tokens, il, f"scan {name}", heads, size) for name in "qkv"}
        for name in "qk":
            inputs[name] *= np.float32(size**-0.5)
        inputs["g_log"] = -np.abs(self._draw(tokens, il, "g_log", heads))
        inputs["beta"] = np.abs(np.tanh(self._draw(tokens, il, "beta", heads)))
        self.call("gdn_scan", inputs, layer=il, scale=size**-0.5)

    @property
    def _ssm(self) -> SsmConfig:
        assert self.cfg.ssm is not None
        return self.cfg.ssm

    def run(self, *tokens: int, advance: bool = True) -> None:
        """A step of these tokens through every layer."""
        for il in range(self.cfg.n_layer):
            if self.cfg.layer_kind(il).value == "linear":
                self.conv(tokens, il)
                self.scan(tokens, il)
            else:
                if self.cfg.owns_kv(il):
                    self.append(tokens, il)
                self.attend(tokens, il)
        if advance:
            self.call("advance", n=len(tokens))


def programs(small: bool) -> Iterator[Program]:
    """Every program, those that others are compared with first."""
    yield _by_hand()
    plain = [FormatPolicy(), FormatPolicy("fp8", "q4_0")] + ([] if small else [FormatPolicy("q8_0", "fp8")])
    for policy in plain:
        yield from _speculation(policy)
    yield _device_counts()
    yield _refusals()
    yield _snapshots_given_up()
    yield _attention_only()
    yield _borrowed()
    yield from _without_kernels()


def _hybrid() -> ModelConfig:
    ssm = SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1)
    return ModelConfig(4, 2, 64, 64, n_head=4, full_attention_interval=2, ssm=ssm)


def _by_hand() -> Program:
    """What an engine with kernels of its own does: it writes planes, moves lengths, and swaps the states."""
    ssm = SsmConfig(conv_kernel=4, state_size=16, time_step_rank=4, group_count=2)
    cfg = ModelConfig(9, 2, 64, 32, full_attention_interval=4, ssm=ssm)
    p = Program("by hand", cfg, 16, exact=True)
    tokens = {"k": 2 * 64 // 32 * 34, "v": 2 * 32 // 32 * 24}
    sizes = {"conv_state": ssm.conv_dim * ssm.pad, "ssm_state": 16 * 16 * 4, "ssm_state_alt": 16 * 16 * 4}
    attention, recurrent = (3, 7), tuple(il for il in range(9) if il not in (3, 7))

    def fill(il: int, plane: str, tag: int, start: int, count: int) -> None:
        p.call("fill", layer=il, plane=plane, tag=tag, start=start, count=count)

    def rows(start: int, count: int, tag: int) -> None:
        for il in attention:
            fill(il, "k", tag, start * tokens["k"], count * tokens["k"])
            fill(il, "v", tag + 1, start * tokens["v"], count * tokens["v"])

    def stand(pos: int) -> None:
        p.call("assign", pos=pos, len=[pos if il in attention else -1 for il in range(9)])
        p.call("sync_d")

    for il in attention:
        fill(il, "k", 4, 0, 16 * tokens["k"] + 8)
        fill(il, "v", 5, 0, 16 * tokens["v"] + 8)
    for il in recurrent:
        for tag, (plane, size) in enumerate(sizes.items(), start=1):
            fill(il, plane, tag, 0, size)
    stand(5)
    p.call("digest")
    p.call("assign", pos=5, len=[4 if il in attention else -1 for il in range(9)])
    p.call("digest")  # counts the rows that the host says, and what the device says
    p.call("assign", pos=5, len=[5 if il in attention else -1 for il in range(9)])
    p.call("snapshot", slot=0)
    for start, count, tags in ((5, 3, (11,)), (8, 4, (21, 31))):
        if start == 8:
            p.call("snapshot_into", slot=0)
        rows(start, count, tags[0] + 3)
        for il in recurrent:
            for tag in tags:
                fill(il, "conv_state", tag, 0, sizes["conv_state"])
                fill(il, "ssm_state_alt", tag + 1, 0, sizes["ssm_state"])
                p.call("swap", layer=il)
        stand(start + count)
    p.call("digest")
    p.call("rollback", slot=0, accept=2)
    p.call("digest")
    p.call("rollback", slot=0, accept=0)
    p.call("digest")
    p.call("reset")
    p.call("digest")
    return p


def _speculation(policy: FormatPolicy) -> Iterator[Program]:
    """Plain decoding, and the same tokens by snapshot, rollback and replay, and by rounds."""
    name = f"{policy.k}/{policy.v}"
    options = CacheOptions(round_width=4)
    plain = Program(f"plain decoding, {name}", _hybrid(), 16, policy, options)
    plain.run(1, 2, 3)
    for token in range(4, 11):
        plain.run(token)
    plain.call("digest")
    yield plain
    p = Program(f"rollback and replay, {name}", _hybrid(), 16, policy, options, same_as=plain.title)
    p.run(1, 2, 3)
    p.call("snapshot", slot=0)
    p.run(4, 5, 91, 92)
    p.call("rollback", slot=0, accept=2)
    p.call("snapshot", slot=1)  # refused: the replay is pending
    p.call("snapshot_into", slot=0)
    p.call("round", width=2)
    p.append((4, 5, 6), 1)  # refused: a replay takes the accepted rows only
    p.call("rollback", slot=0, accept=3)  # refused: two rows stand
    p.call("advance", n=3)
    p.call("settle")
    p.call("rollback", slot=0, accept=2)
    p.run(4)
    p.run(5)
    p.call("snapshot_into", slot=0)
    p.run(93, 94, advance=False)
    p.call("rollback", slot=0, accept=0)  # in the middle of a step
    p.run(6)
    p.run(7)  # an odd number of swaps since the snapshot, and then rows that stand
    p.call("rollback", slot=0, accept=2)
    p.run(6, 7)
    p.run(8, 9, 10)
    p.call("digest")
    yield p
    p = Program(f"rounds, {name}", _hybrid(), 16, policy, options, same_as=plain.title)
    p.run(1, 2, 3)
    p.call("round", width=4)
    p.run(4, 5, 91, 92, advance=False)
    p.call("advance", n=4)  # refused: the commit moves pos
    p.call("commit", accept=5)  # refused: it ran four rows
    p.call("commit", accept=2)
    p.call("round", width=3)
    p.append((1, 2, 3, 4), 1)  # refused: wider than the round
    p.run(6, 7, 8, advance=False)
    p.call("commit", accept=3)
    p.call("round", width=2)
    p.run(93, 94, advance=False)
    p.call("reject")
    p.call("round", width=4)
    p.run(9, 95, advance=False)
    p.call("commit", accept=0)
    p.call("round", width=4)
    p.run(9, 95, 96, 97, advance=False)
    p.call("commit", accept=1)
    p.call("snapshot", slot=0)
    p.call("round", width=2)
    p.run(98, 99, advance=False)
    p.call("rollback", slot=0, accept=1)  # refused: nothing of a round stands before its commit
    p.call("rollback", slot=0, accept=0)
    p.run(10)
    p.call("digest")
    yield p


def _device_counts() -> Program:
    """Rounds whose accept count the host does not know until it settles."""
    p = Program(
        "accept counts on the device", _hybrid(), 20, options=CacheOptions(round_width=3),
        same_as="plain decoding, q8_0/q5_1",
    )  # fmt: skip
    p.run(1, 2, 3)
    p.call("snapshot", slot=1)
    p.call("round", width=3)
    p.run(4, 5, 91, advance=False)
    p.call("commit_device", count=2)
    p.call("snapshot", slot=0)  # refused: the host must settle first
    p.call("rollback", slot=1, accept=0)
    p.append((6,), 1)
    p.call("advance", n=1)
    p.call("sync_d")
    p.call("digest")
    p.call("assign", pos=5, len=[-1] * 4)
    p.attend((5,), 1)
    p.call("assign", pos=6, len=[-1] * 4)
    p.call("round", width=2)
    p.run(6, 92, advance=False)
    p.call("commit_device", count=1)
    p.call("settle")
    p.call("settle")
    p.call("round", width=3)
    p.run(93, 94, 95, advance=False)
    p.call("commit_device", count=4)  # a count that cannot be rejects, and is reported
    p.call("round", width=2)
    p.run(7, 96, advance=False)
    p.call("settle")  # refused: a round is open
    p.call("commit", accept=1)  # a count that the host knows, on top of one that it does not
    p.call("round", width=2)
    p.run(97, 98, advance=False)
    p.call("reject")
    p.call("settle")
    p.call("round", width=3)
    p.run(8, 9, 10, advance=False)
    p.call("commit_device", count=3)
    p.call("settle")
    p.call("digest")
    return p


def _refusals() -> Program:
    """Each call that is refused here leaves every byte and number as it was."""
    p = Program("refusals", _hybrid(), 6, options=CacheOptions(round_width=2, max_rows=4))
    p.attend((1,), 1)  # nobody wrote the row
    p.append((1, 2), 0)  # layer 0 has no K/V
    p.conv((1, 2), 1)
    p.call("append_kv", dict(p.steps[-2][1]), layer=9)
    p.call("conv_update", dict(p.steps[-2][1]), layer=9)
    p.attend((1,), 0)
    p.append((1, 2, 3, 4, 5, 6, 7), 1)
    p.append((), 1)  # no rows: nothing
    p.conv((), 0)
    p.append((1, 2), 1)
    p.append((1, 2), 1)  # twice in a step
    p.append((1,), 3)  # another number of rows
    p.call("snapshot", slot=0)
    p.call("round", width=2)
    p.call("advance", n=1)
    p.call("advance", n=2)
    p.append((3,), 3)  # behind rows that nobody wrote
    p.call("assign", pos=2, len=[-1, 2, -1, 2])
    p.call("sync_d")
    p.append((3,), 3)
    p.call("advance", n=1)
    p.call("snapshot", slot=0)
    p.call("rollback", slot=0, accept=1)
    p.call("rollback", slot=0, accept=-1)
    p.call("truncate", to=1)
    p.call("round", width=3)
    p.call("round", width=0)
    p.call("round", width=2)
    p.call("round", width=2)
    p.call("snapshot", slot=0)
    p.call("commit", accept=0)  # it ran nothing
    p.call("reject")
    p.call("commit", accept=0)  # it is over
    p.call("reject")
    p.append((4,), 3)
    p.call("commit", accept=1)  # of a step of no round
    p.call("rollback", slot=0, accept=0)
    p.call("advance", n=-1)
    p.call("advance", n=4)
    for pos in (-1, 7):  # out of range
        p.call("assign", pos=pos, len=[-1, 2, -1, 3])
        p.call("sync_d")
        p.call("digest")
        p.call("advance", n=1)
        p.call("round", width=2)
        p.append((4,), 1)
        p.attend((4,), 1)
    p.call("assign", pos=3, len=[-1, 7, -1, 3])
    p.call("settle")  # there is nothing to settle
    p.call("snapshot", slot=0)
    p.append((4,), 1)
    p.attend((4,), 1)
    p.call("assign", pos=2, len=[-1] * 4)
    p.attend((3,), 3)  # whose own length is in range
    p.call("assign", pos=3, len=[-1, 3, -1, 3])
    p.call("round", width=2)
    p.append((4,), 1)
    for pos in (-1, 6):  # 6: behind its row it would be out of range
        p.call("assign", pos=pos, len=[-1] * 4)
        p.call("commit", accept=1)
    p.call("assign", pos=3, len=[-1] * 4)
    p.call("reject")
    p.call("round", width=2)
    p.append((4,), 1)
    p.call("assign", pos=3, len=[-1, 7, -1, 7])  # no length is in the way of a commit
    p.call("commit", accept=1)
    p.call("assign", pos=3, len=[-1, 4, -1, 3])
    p.call("round", width=2)
    p.append((4,), 1)  # a round would give up a row
    p.call("reject")
    p.call("assign", pos=3, len=[-1, 3, -1, 3])
    p.call("sync_d")
    p.attend((1, 2, 3, 4, 5), 1)  # more rows than max_rows
    p.attend((4,), 1, -1)
    p.call("round", width=2)
    p.append((4,), 1)
    p.call("reset")  # and the round is over
    p.call("rollback", slot=0, accept=0)  # of an earlier generation
    p.call("snapshot_into", slot=0)
    p.call("rollback", slot=0, accept=0)
    return p


def _snapshots_given_up() -> Program:
    """A snapshot is good as long as the rows below it stand."""
    p = Program("snapshots given up", _hybrid(), 12)
    p.run(1, 2)
    p.call("snapshot", slot=0)
    p.run(3)
    p.call("snapshot", slot=1)
    p.run(4)
    p.call("snapshot", slot=2)
    p.call("rollback", slot=0, accept=1)  # 2 stands above, 1 does not
    p.call("rollback", slot=2, accept=0)
    p.run(3)
    p.call("rollback", slot=1, accept=0)
    p.run(5)
    p.call("rollback", slot=0, accept=0)
    p.call("rollback", slot=1, accept=0)
    p.call("snapshot_into", slot=1)
    p.call("rollback", slot=1, accept=0)
    for number, op in enumerate(("append_kv", "advance", "sync_d")):  # an engine that moves pos by itself
        p.call("assign", pos=4, len=[-1, 4, -1, 4])
        p.call("sync_d")
        p.call("snapshot", slot=number)
        p.call("assign", pos=2, len=[-1, 2, -1, 2])
        if op == "append_kv":
            p.run(6)
        elif op == "advance":
            p.call(op, n=1)
        else:
            p.call(op)
        p.call("rollback", slot=number, accept=0)
    return p


def _attention_only() -> Program:
    """Without recurrent layers a cache may go back by a length."""
    p = Program("truncate", ModelConfig(2, 2, 64, 64, n_head=2), 8, FormatPolicy("fp8", "fp8"), exact=True)
    p.run(1, 2, 3, 4)
    p.call("snapshot", slot=0)
    p.call("truncate", to=5)
    p.call("truncate", to=-1)
    p.call("truncate", to=2)
    p.call("digest")
    p.call("rollback", slot=0, accept=0)  # its rows were given up
    p.append((5,), 0)
    p.call("truncate", to=1)  # a step is open
    p.append((5,), 1)
    p.attend((5,), 1)
    p.call("advance", n=1)
    p.call("digest")
    p.call("truncate", to=0)
    p.run(6)
    p.call("digest")
    for pos in (1, 2, 3):  # an engine with kernels of its own
        p.call("assign", pos=pos, len=[pos, pos])
        p.call("sync_d")
        if pos < 3:
            p.call("snapshot", slot=pos)
    p.call("rollback", slot=1, accept=2)
    p.call("advance", n=1)  # a replay gives up nothing
    p.call("advance", n=1)
    p.call("rollback", slot=2, accept=0)
    p.call("assign", pos=1, len=[1, 1])
    p.call("advance", n=0)  # is nothing
    p.call("assign", pos=3, len=[3, 3])
    p.call("rollback", slot=2, accept=1)
    return p


def _borrowed() -> Program:
    """Windowed and global layers, two of which read the K/V of an earlier one of their kind."""
    gemma = Gemma4Config((2, 1, 2, 1), (True, False, True, False), 3, 128, 64, shared_kv_layers=2)
    p = Program("borrowed K/V", ModelConfig(4, 2, 64, 64, n_head=4, gemma4=gemma), 9, exact=True)
    p.append((1,), 2)  # it has none of its own
    p.run(1, 2, 3, 4, 5)
    p.run(6, 7)
    p.append((8,), 0)
    p.attend((8,), 2)
    p.attend((8,), 2, 0)
    p.attend((8,), 2, 1)
    p.attend((8,), 3)  # layer 1 has not appended yet
    p.append((8,), 1)
    p.attend((8,), 3, 2)
    p.call("advance", n=1)
    p.call("digest")
    return p


def _without_kernels() -> Iterator[Program]:
    """Caches that may be, with calls that no kernel serves."""
    ssm = SsmConfig(conv_kernel=4, state_size=16, time_step_rank=2, group_count=1)
    p = Program("no kernel for V, none for a state", ModelConfig(2, 1, 64, 32, full_attention_interval=2, ssm=ssm), 4)
    p.run(1)
    yield p
    p = Program("no kernel for K", ModelConfig(1, 1, 32, 64), 4)
    p.run(1)
    yield p
    heads = Step35Config((34, 3, 4, 4, 0), (2,) * 5, (False,) * 3, 3)  # over two K/V heads; layers 3 and 4 are windowed
    cfg = ModelConfig(5, 2, 64, 64, step35=heads)
    p = Program("no kernel for so many heads", cfg, 8, options=CacheOptions(max_rows=4))
    p.run(1)
    for il in (2, 3):
        p.append((2, 3, 4, 5), il)
        p.attend((2, 3, 4, 5), il)
    yield p
