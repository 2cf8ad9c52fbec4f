"""The library as a Python program calls it, with nothing but ctypes.

GPREEMPT_LIBRARY is the path of libgpreempt.so, GPREEMPT_SOCKET the socket of a daemon on
a simulated machine, and GPREEMPT_TEST_PID an offline process there.
"""

import ctypes
import errno
import os
import threading
import time
import unittest


class Request(ctypes.Structure):
    _fields_ = [
        ("label", ctypes.c_char_p),
        ("request_id", ctypes.c_char_p),
        ("gpu_ids", ctypes.POINTER(ctypes.c_uint32)),
        ("gpu_count", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("ttl_us", ctypes.c_int64),
        ("max_wait_us", ctypes.c_int64),
        ("eta_us", ctypes.c_int64),
        ("reserved", ctypes.c_uint64 * 4),
    ]


class Lease(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_char * 64),
        ("quiet", ctypes.c_int32),
        ("reason", ctypes.c_int32),
        ("suspended", ctypes.c_uint32),
        ("owner_offline", ctypes.c_int32),
        ("owner", ctypes.c_int32),
        ("ttl_us", ctypes.c_int64),
        ("connection", ctypes.c_uint64),
    ]


class Queue(ctypes.Structure):
    _fields_ = [
        ("queue_id", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("gpu_id", ctypes.c_uint32),
        ("tag", ctypes.c_char * 64),
        ("is_active", ctypes.c_int32),
        ("process_id", ctypes.c_int32),
        ("process_class", ctypes.c_int32),
        ("process_state", ctypes.c_int32),
        ("kfd_priority", ctypes.c_int32),
        ("queue_address", ctypes.c_uint64),
        ("ring_bytes", ctypes.c_uint64),
        ("type", ctypes.c_char * 16),
        ("comm", ctypes.c_char * 16),
    ]


lib = ctypes.CDLL(os.environ["GPREEMPT_LIBRARY"])
lib.gpreempt_last_error.restype = ctypes.c_char_p
lib.gpreempt_suspend_process.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64]
ALL_GPUS, OWN_GPUS = 2**32 - 1, 2**32 - 2  # gpreempt.h
PID = int(os.environ["GPREEMPT_TEST_PID"])


def queues():
    """Returns [(queue_id, active)] of the process."""
    found, count = ctypes.POINTER(Queue)(), ctypes.c_uint32()
    err = answered(lib.gpreempt_find_queues_by_process, PID, ctypes.byref(found), ctypes.byref(count))
    assert err == 0, lib.gpreempt_last_error()
    listed = [(q.queue_id, q.is_active) for q in found[: count.value]]
    assert {(q.process_id, q.type, q.process_class) for q in found[: count.value]} == {(PID, b"compute", 3)}
    lib.gpreempt_free_queue_info(found)
    return listed


def answered(call, *arguments):
    """Repeats a call that a busy machine did not answer in time, or another thread's just before."""
    err = call(*arguments)
    for _ in range(50):
        if err != -errno.ETIMEDOUT:
            break
        time.sleep(0.1)
        err = call(*arguments)
    return err


def notify(request, lease):
    return answered(lib.gpreempt_notify_online, ctypes.byref(request), ctypes.byref(lease))


def complete(lease):
    return answered(lib.gpreempt_complete, ctypes.byref(lease))


class Library(unittest.TestCase):
    def test_announce_and_complete(self):
        request, lease = Request(label=b"python", gpu_count=ALL_GPUS, max_wait_us=10_000_000, ttl_us=20_000_000), Lease()
        self.assertEqual(notify(request, lease), 0)
        self.assertEqual((lease.quiet, lease.reason, lease.suspended, lease.owner_offline, lease.ttl_us), (1, 1, 1, 0, 20_000_000))
        self.assertEqual(queues(), [(0, 0), (1, 0)])
        self.assertEqual(complete(lease), 0)
        self.assertEqual(lease.id, b"")

    def test_refusals_have_a_text(self):
        lease = Lease()
        for request in (
            Request(label=b"x" * 129, gpu_count=ALL_GPUS),
            Request(request_id=b"x" * 65, gpu_count=ALL_GPUS),
            Request(ttl_us=20_000_001, gpu_count=ALL_GPUS),
            Request(max_wait_us=-2, gpu_count=ALL_GPUS),
            Request(gpu_count=65),
            Request(gpu_count=1),
            Request(reserved=(0, 0, 0, 1), gpu_count=ALL_GPUS),
            Request(priority=16, gpu_count=ALL_GPUS, max_wait_us=10_000_000),
            Request(gpu_ids=(ctypes.c_uint32 * 1)(7), gpu_count=1, max_wait_us=10_000_000),
        ):
            self.assertEqual(notify(request, lease), -errno.EINVAL)
            self.assertNotEqual(lib.gpreempt_last_error(), b"")
        self.assertEqual(answered(lib.gpreempt_suspend_process, PID, (ctypes.c_uint32 * 1)(0), 1, 0), -errno.EOPNOTSUPP)

    def test_gpus_must_be_named(self):
        lease = Lease()
        self.assertEqual(lib.gpreempt_notify_online(None, ctypes.byref(lease)), -errno.EINVAL)
        self.assertEqual(lib.gpreempt_notify_online(ctypes.byref(Request(max_wait_us=10_000_000)), ctypes.byref(lease)), -errno.EINVAL)
        self.assertEqual(lib.gpreempt_last_error(), b"gpu_count is 0: use 1 to 64 gpu_ids, GPREEMPT_ALL_GPUS or GPREEMPT_OWN_GPUS")
        self.assertEqual(notify(Request(gpu_count=OWN_GPUS, max_wait_us=10_000_000, ttl_us=20_000_000), lease), 0)
        self.assertEqual((lease.quiet, lease.suspended), (1, 1))
        self.assertEqual(complete(lease), 0)

    def test_threads_share_the_connection(self):
        results = []

        def work():
            request = Request(gpu_count=ALL_GPUS, max_wait_us=10_000_000, ttl_us=20_000_000)
            for _ in range(20):
                lease = Lease()
                results.append(notify(request, lease))
                results.append(complete(lease))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [0] * 320)


if __name__ == "__main__":
    unittest.main()
