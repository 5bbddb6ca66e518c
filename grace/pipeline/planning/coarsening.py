"""Coarsening: groups of nodes are merged into fewer, larger ones, level by level, without cycles between groups.

The groups of a level are kept in a topological order of their own. Two adjacent groups u -> v may be merged if no other
path leads from u to v: a search from u that stays before v in that order. Then what lies between them and depends on u
moves behind both, and all else before (Pearce and Kelly's dynamic topological order, ACM JEA 2007).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from grace.pipeline.planning.graph import Graph

Fits = Callable[[float, float], bool]
"""Function that returns True if a group fits on a device, of its bytes of parameters and its other bytes (see
``ModelBlock.kept``)."""


def closed(graph: Graph) -> list[list[int]]:
    """Return the units of a graph, the smallest groups of nodes that may be a stage: nodes that must be together, with
    all nodes between them.

    Returns:
        numbers of the nodes of each unit, in the graph's order; units are in topological order.
    """
    parent = list(range(len(graph.nodes)))

    def root(i: int) -> int:
        """Return the representative of a node's group."""
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for group in graph.together:
        first, *others = sorted(graph.index[name] for name in group) or [0]
        for other in others:
            low, high = sorted((root(first), root(other)))
            parent[high] = low
    reads: dict[int, dict[int, None]] = {root(i): {} for i in range(len(graph.nodes))}
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            if name in graph.index and root(graph.index[name]) != root(i):
                reads[root(i)][root(graph.index[name])] = None
    members: dict[int, list[int]] = {}
    for i in range(len(graph.nodes)):
        members.setdefault(root(i), []).append(i)
    return [sorted(i for one in circle for i in members[one]) for circle in _components(reads)]


def _components(reads: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Return the strongly connected components in topological order, by Tarjan's algorithm without recursion."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for start in reads:
        if start in number:
            continue
        work = [(start, iter(reads[start]))]
        number[start] = low[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while work:
            at, others = work[-1]
            for other in others:
                if other not in number:
                    number[other] = low[other] = len(number)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(reads[other])))
                    break
                if other in on_stack:
                    low[at] = min(low[at], number[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == number[at]:
                    component: list[int] = []
                    while not component or component[-1] != at:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    found.append(component)
    return found


class Groups:
    """Groups of units. The number of one of its units is a group's name.

    Args:
        graph: the model.
        units: the smallest groups, in topological order (:func:`closed`).
    """

    def __init__(self, graph: Graph, units: Sequence[Sequence[int]]):
        of = {i: u for u, members in enumerate(units) for i in members}
        self.seconds, self.kept = [0.0] * len(units), [0.0] * len(units)
        self.parameters: list[dict[str, float]] = [{} for _ in units]
        self.readers: list[dict[int, None]] = [{} for _ in units]
        self.reads: list[dict[int, None]] = [{} for _ in units]
        self.members: dict[int, list[int]] = {u: [u] for u in range(len(units))}
        """Units of each group, by the group's number."""
        self.order = list(range(len(units)))
        self.place = list(range(len(units)))
        for i, node in enumerate(graph.nodes):
            u = of[i]
            self.seconds[u] += node.forward + node.backward
            self.kept[u] += graph.kept_by_row(node)
            self.parameters[u].update(node.parameters)
            for name in node.inputs:
                other = of[graph.index[name]] if name in graph.index else u
                if other != u:
                    self.readers[other][u] = self.reads[u][other] = None

    def merge_level(self, most: int, cap: float, fits: Fits) -> bool:
        """Merge each group with at most one adjacent group: in ascending order of seconds, with the one that makes the
        shortest group.

        Args:
            most: number of groups at which merging ends.
            cap: largest number of seconds of a merged group.
            fits: True if a merged group fits in memory.

        Returns:
            True if any groups were merged.
        """
        done: set[int] = set()
        for one in sorted(self.order, key=lambda g: (self.seconds[g], self.place[g])):
            if len(self.members) <= most:
                break
            if one in done:
                continue
            near = [other for other in (*self.reads[one], *self.readers[one]) if other not in done]
            for other in sorted(near, key=lambda g: (self.seconds[g], self.place[g])):
                if self.seconds[one] + self.seconds[other] > cap:
                    break
                first, last = sorted((one, other), key=self.place.__getitem__)
                if self._fit(first, last, fits) and self._merge(first, last):
                    done |= {first, last}
                    break
        self.order = [group for group in self.order if group in self.members]
        for i, group in enumerate(self.order):
            self.place[group] = i
        return bool(done)

    def _fit(self, first: int, last: int, fits: Fits) -> bool:
        """Return True if two groups together fit in memory."""
        more = sum(n for name, n in self.parameters[last].items() if name not in self.parameters[first])
        return fits(sum(self.parameters[first].values()) + more, self.kept[first] + self.kept[last])

    def _merge(self, first: int, last: int) -> bool:
        """Merge two groups, under the number of the first, unless another path leads from the first to the last. Return
        True if they were merged."""
        place, end = self.place, self.place[last]
        behind = {first}
        ahead = [g for g in self.readers[first] if g != last and place[g] < end]
        while ahead:
            one = ahead.pop()
            if one in behind:
                continue
            behind.add(one)
            if last in self.readers[one]:
                return False
            ahead += [g for g in self.readers[one] if place[g] < end]
        between = [g for g in self.order[place[first] : end] if g in self.members]
        before = [g for g in between if g not in behind]
        after = [g for g in between if g in behind and g != first]
        free = [self.order[i] for i in range(place[first], end + 1) if self.order[i] not in self.members]
        moved = [*before, first, *after, *free, last]
        self.order[place[first] : end + 1] = moved
        for i, group in enumerate(moved, end + 1 - len(moved)):
            place[group] = i
        self.seconds[first] += self.seconds[last]
        self.kept[first] += self.kept[last]
        self.parameters[first].update(self.parameters[last])
        for ours, theirs in ((self.readers, self.reads), (self.reads, self.readers)):
            for other in ours[last]:
                theirs[other].pop(last, None)
                if other != first:
                    ours[first][other] = theirs[other][first] = None
            ours[first].pop(last, None)
        self.members[first] += self.members.pop(last)
        return True


def coarsened(groups: Groups, most: int, cap: float, fits: Fits) -> list[list[list[int]]]:
    """Return the units of the groups of each level, coarsest last; each level's groups are in topological order."""
    levels = []
    merging = True
    while merging:
        levels.append([sorted(groups.members[group]) for group in groups.order])
        merging = len(groups.members) > most and groups.merge_level(most, cap, fits)
    return levels
