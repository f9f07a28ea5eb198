"""What is still alive, by weak reference; how many objects there are."""

import weakref

from support.zoo import Evaluations


class Watch:
    """Notes objects by weak reference, those of recomputes too."""

    def __init__(self):
        self._refs = Evaluations()

    def __call__(self, item):
        self._refs.note(weakref.ref(item))
        return item

    def __len__(self):
        return len(self._refs)

    @property
    def alive(self):
        refs = [*self._refs]
        for ref in refs:
            self._refs.note(ref)
        return sum(ref() is not None for ref in refs)
