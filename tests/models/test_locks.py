"""Locks and forks."""

from __future__ import annotations

import multiprocessing
import threading

from memopt.models.locks import ForkedLock


def _take(lock: ForkedLock, taken: multiprocessing.synchronize.Event) -> None:
    with lock, lock:
        taken.set()


def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child() -> None:
    lock, held, over = ForkedLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    taken = context.Event()
    child = context.Process(target=_take, args=(lock, taken))
    child.start()
    child.join(timeout=30)
    alive = child.is_alive()
    child.kill()
    over.set()
    holder.join()
    assert taken.is_set()
    assert not alive
    with lock:
        pass


def test_the_thread_that_forks_gives_its_lock_back_in_the_child() -> None:
    lock = ForkedLock()
    context = multiprocessing.get_context("fork")
    taken = context.Event()
    with lock:
        child = context.Process(target=_take, args=(lock, taken))
        child.start()
        child.join(timeout=30)
    assert child.exitcode == 0
    assert taken.is_set()
