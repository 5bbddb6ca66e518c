"""Search for objects by their class, beside other threads."""

import threading

from grace.core.live_instances import live_instances


class Layer:
    pass


class Wide(Layer):
    pass


def test_instances_are_found_while_other_threads_fill_tuples():
    """CPython raises SystemError in a thread that is filling a tuple to which somebody else refers."""
    others = [[] for _ in range(200_000)]  # a search takes long enough for other threads to run
    errors: list[SystemError] = []
    end = threading.Event()

    def fill():
        while not end.is_set():
            try:
                tuple(number for number in range(20))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        layers = [Layer(), Wide()]
        assert {id(layer) for layer in live_instances(Layer)} == {id(layer) for layer in layers}
    end.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert others
