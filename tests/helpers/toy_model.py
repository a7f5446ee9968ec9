"""A toy network with one number per chunk and stage, and two ways to compute its gradient.

A stage maps a chunk's x to  y = a_s x + sum over the earlier chunks j of its sequences of w_cj k_j,
where k_j = x_j stands for their K,V; the loss is the sum of v_c y_c of the last stage. `gradient`
follows the definition, chunk by chunk, whatever the order of a plan. `obey` runs the plan, action
by action, and keeps what the plan keeps: a plan that the checker accepts must run to its end and
give the same gradient. If a plan gathers weights with every pass, the n-th passes of all ranks of a
stage gather together: if one runs forward and another backward, both get weights of wrong layers.
"""

from collections import Counter, defaultdict, deque
from functools import cache

from furlong.plan.passes import kv_frees
from furlong.plan.plan import (
    Backward,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Send,
)


class StuckError(Exception):
    """A plan that needs a value that does not exist, or leaves one over."""


def token(chunk):
    return 1 + (7 * chunk % 5) / 4


def label_weight(plan, chunk):
    return 0 if plan.chunks[chunk].is_dummy else 1 + (3 * chunk % 7) / 8


def scale(stage):
    return 0.75 + (stage % 3) / 4


def weight(chunk, earlier):
    return ((chunk * 31 + earlier * 17) % 11 - 5) / 16


def prefixes(plan):
    """Return for each chunk all earlier chunks on the paths of the sequences that it continues."""
    return [
        sorted({plan.groups[seq_id][i] for seq_id, at in links for i in path(plan, seq_id, at)})
        for links in plan.links
    ]


def path(plan, seq_id, position):
    """Return the positions in a sequence's group of the chunks before one of them on its path."""
    if all(piece.parent is None for chunk in plan.chunks for piece in chunk.slices):
        return range(position)
    found, group = [], plan.groups[seq_id]
    own = {s.stop: i for i, c in enumerate(group) for s in plan.chunks[c].slices
           if s.seq_id == seq_id}  # fmt: skip
    while position is not None:
        piece = next(s for s in plan.chunks[group[position]].slices if s.seq_id == seq_id)
        position = own.get(piece.start if piece.parent is None else piece.parent)
        found.append(position)
    return found[:-1]


def gradient(plan):
    """Return [d loss / d a_s for each stage] with the plan's factors, by the definition."""
    before = prefixes(plan)
    after = [[j for j, earlier in enumerate(before) if c in earlier] for c in range(len(before))]
    factors = {
        a.chunk: (a.loss_factor, a.relay_factor)
        for actions in plan.actions
        for a in actions
        if isinstance(a, Backward)
    }
    last = len(plan.stages) - 1

    @cache
    def entering(chunk, stage):
        if not stage:
            return token(chunk)
        below = stage - 1
        seen = sum(weight(chunk, j) * entering(j, below) for j in before[chunk])
        return scale(below) * entering(chunk, below) + seen

    @cache
    def of_output(chunk, stage):
        if stage == last:
            return factors[chunk][0] * label_weight(plan, chunk)
        above = stage + 1
        relayed = sum(weight(j, chunk) * of_output(j, above) for j in after[chunk] if j in factors)
        return scale(above) * of_output(chunk, above) + factors[chunk][1] * relayed

    return [
        0.0
        if stage < plan.frozen_stages
        else sum(of_output(chunk, stage) * entering(chunk, stage) for chunk in factors)
        for stage in range(last + 1)
    ]


def obey(plan):
    """Return the same by running the plan. Raises StuckError if a value is missing or left over."""
    mail, meetings = defaultdict(deque), defaultdict(dict)
    ranks = [_Rank(plan, rank, mail, meetings) for rank in range(len(plan.actions))]
    while any(rank.go_on() for rank in ranks):
        pass
    for rank in ranks:
        rank.assert_done()
    if any(mail.values()):
        raise StuckError("a message is left over")
    return [sum(rank.grads[stage] for rank in ranks) for stage in range(len(plan.stages))]


class _Rank:
    def __init__(self, plan, rank, mail, meetings):
        self.plan, self.rank, self.mail, self.meetings = plan, rank, mail, meetings
        self.num_passes, self.weights = Counter(), 1.0
        self.actions, self.frees = plan.actions[rank], kv_frees(plan, rank)
        self.at = 0
        self.before = prefixes(plan)
        self.kv, self.relayed, self.graphs = {}, defaultdict(float), set()
        self.inputs, self.outputs, self.output_grads = {}, {}, {}
        self.trained = {(a.chunk, a.stage) for a in self.actions if isinstance(a, Backward)}
        rebuilt = [(a.chunk, a.stage) for a in self.actions if isinstance(a, RebuildKV)]
        self.rebuilds_left = Counter(rebuilt)
        self.grads = defaultdict(float)

    def go_on(self):
        """Run actions up to a message that has not arrived; return whether any action ran."""
        start = self.at
        while self.at < len(self.actions):
            action = self.actions[self.at]
            if isinstance(action, Recv) and not self.mail[action.peer, self.rank]:
                break
            if self.plan.regathers and self.gathers(action) and not self.gather(action):
                break
            try:
                self.obey(action)
            except KeyError as missing:
                raise StuckError(f"{missing} at {action}") from missing
            for cell in self.frees[self.at]:
                del self.kv[cell]
                self.relayed.pop(cell, None)
            self.at += 1
        return self.at > start

    def gathers(self, action):
        """Return whether the action runs any layer: a last stage skips a Forward whose graph is
        dropped and whose K,V is never read."""
        if not isinstance(action, Forward):
            return isinstance(action, (Recompute, RebuildKV, Backward))
        cell = action.chunk, action.stage
        wanted = cell not in self.trained and (
            self.plan.report_loss or self.plan.chunks[action.chunk].is_dummy
        )
        is_last = action.stage == len(self.plan.stages) - 1
        continues = self.plan.continues[action.chunk]
        return not is_last or action.keep == "all" or wanted or continues

    def gather(self, action):
        """Join the next gathering of a stage; return whether all of its ranks have."""
        meeting = self.meetings[action.stage, self.num_passes[action.stage]]
        meeting[self.rank] = isinstance(action, Backward)
        holders = sum(
            any(a.stage == action.stage for a in own if not isinstance(a, (Send, Recv)))
            for own in self.plan.actions
        )
        if len(meeting) < holders:
            return False
        self.num_passes[action.stage] += 1
        self.weights = 1.0 if len(set(meeting.values())) == 1 else 2.0
        return True

    def obey(self, action):
        match action:
            case Forward(chunk, stage, keep):
                cell = chunk, stage
                self.inputs[cell] = self.outputs.pop((chunk, stage - 1)) if stage else token(chunk)
                self.outputs[cell] = self.run(chunk, stage)
                if self.plan.continues[chunk]:
                    self.kv[cell] = self.inputs[cell]
                if keep == "all":
                    self.graphs.add(cell)
                elif keep not in ("input", "kv", "attention"):
                    raise StuckError(keep)
                self.drop_input(cell)
                if stage == len(self.plan.stages) - 1:
                    del self.outputs[cell]
            case RebuildKV(chunk, stage):
                self.run(chunk, stage)
                self.kv[chunk, stage] = self.inputs[chunk, stage]
                self.rebuilds_left[chunk, stage] -= 1
                self.drop_input((chunk, stage))
            case Recompute(chunk, stage):
                self.run(chunk, stage)
                self.graphs.add((chunk, stage))
            case Backward():
                self.backward(action)
            case Send(payload, chunk, stage, peer):
                values = self.outputs if payload == "activation" else self.output_grads
                below = stage if payload == "activation" else stage - 1
                self.mail[self.rank, peer].append(
                    (payload, chunk, stage, values.pop((chunk, below)))
                )
            case Recv(payload, chunk, stage, peer):
                *message, value = self.mail[peer, self.rank].popleft()
                if message != [payload, chunk, stage]:
                    raise StuckError(f"{message} has come, not {action}")
                if payload == "activation":
                    self.outputs[chunk, stage] = value
                else:
                    self.output_grads[chunk, stage - 1] = value

    def drop_input(self, cell):
        """Drop the input of a cell that no later Backward or RebuildKV needs."""
        if cell not in self.trained and not self.rebuilds_left[cell]:
            del self.inputs[cell]

    def run(self, chunk, stage):
        seen = sum(weight(chunk, j) * self.kv[j, stage] for j in self.before[chunk])
        return self.weights * scale(stage) * self.inputs[chunk, stage] + seen

    def backward(self, action):
        chunk, stage = cell = action.chunk, action.stage
        self.graphs.remove(cell)
        if stage == len(self.plan.stages) - 1:
            grad = action.loss_factor * label_weight(self.plan, chunk)
        else:
            grad = self.output_grads.pop(cell)
        self.grads[stage] += self.weights * grad * self.inputs.pop(cell)
        for earlier in self.before[chunk]:
            _ = self.kv[earlier, stage]
            self.relayed[earlier, stage] += weight(chunk, earlier) * grad
        relayed = action.relay_factor * self.relayed.pop(cell, 0.0)
        if stage > self.plan.frozen_stages:
            self.output_grads[chunk, stage - 1] = scale(stage) * grad + relayed

    def assert_done(self):
        if self.at < len(self.actions):
            raise StuckError(f"rank {self.rank} waits at {self.actions[self.at]}")
        for name in ("kv", "graphs", "inputs", "outputs", "output_grads"):
            if getattr(self, name):
                raise StuckError(f"{name} left over on rank {self.rank}: {getattr(self, name)}")
