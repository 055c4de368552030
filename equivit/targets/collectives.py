"""Transfers between cards: their bytes and their time, from the text of a program."""

import re
from typing import NamedTuple

import numpy as np

from equivit.kernels.mesh import HOST
from equivit.targets.cards import Card, Target
from equivit.targets.program import Computation, Instruction

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Collective(NamedTuple):
    """One transfer, as each card takes part in it."""

    kind: str
    bytes: int  # that a card sends
    seconds: float  # bytes over the bandwidth of the links


def kind(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction starts or performs; None for others."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in KINDS else None


def ends(instruction: Instruction) -> bool:
    """Whether an instruction waits for a collective."""
    return instruction.opcode.removesuffix("-done") in KINDS and instruction.opcode.endswith("-done")


def collective(computation: Computation, instruction: Instruction, target: Target) -> Collective:
    """Account for a collective on the cards of a target, as a ring."""
    operands = [computation[name] for name in instruction.operands if name in computation]
    groups, word = _groups(instruction.attributes, target.count), kind(instruction) or ""
    given, n = sum(operand.bytes for operand in operands), groups.shape[1]
    if word == "collective-permute":
        sent = given
    else:  # the whole array in n parts, of which each card already has one
        whole = given * n if word == "all-gather" else given
        sent = whole * (n - 1) // n * (2 if word == "all-reduce" else 1)
    return Collective(word, sent, sent / _bandwidth(groups, target.card))


def _bandwidth(groups: np.ndarray, card: Card) -> float:
    """Bytes per second that a card can send: over the links of a host, or also over the network of its hosts."""
    hosts = groups // HOST
    across = hosts[(hosts != hosts[:, :1]).any(axis=1)]
    if not len(across):
        return card.link
    sharing = np.bincount(across[0]).max()  # cards of a group on one host, which share what they send
    return min(card.link, sharing * card.network)


def _groups(attributes: str, cards: int) -> np.ndarray:
    """The groups of cards that exchange, [groups, n]; of a permutation, the pairs."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes):
        return _listed(pairs[1])
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
        return _listed(listed[1])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = (tuple(map(int, part.split(","))) if part else () for part in iota.groups())
        ids = np.arange(np.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape)
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        taken = [list(axes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        ids = np.arange(np.prod(list(axes.values()))).reshape(tuple(axes.values()))
        return np.moveaxis(ids, taken, range(-len(taken), 0)).reshape(-1, np.prod([ids.shape[axis] for axis in taken]))
    return np.arange(cards)[None]


def _listed(text: str) -> np.ndarray:
    return np.array([list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)])
