"""How processes agree on shared GPU memory and trade handles of it. Here they are threads, and memory is a file."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import pytest

from jax_mok.runtime import processes
from jax_mok.runtime.sharing import FABRIC, FILES, Board, Mailbox, Seating, name_of

CAN = {FABRIC: "", FILES: ""}
NO_FABRIC = {FABRIC: "the CUDA driver refused it", FILES: ""}
OWNERS = [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]  # three processes, two GPUs each


class Store:
    def __init__(self):
        self.known, self.news = {}, threading.Condition()
        self.board = Board(self.post, self.read)

    def post(self, name, text):
        with self.news:
            assert name not in self.known
            self.known[name] = text
            self.news.notify_all()

    def read(self, name, seconds):
        with self.news:
            return self.known[name] if self.news.wait_for(lambda: name in self.known, seconds) else None


def in_all(act, processes=3):
    """What ``act(process)`` returned or raised in each."""

    def guarded(process):
        try:
            return act(process)
        except Exception as error:
            return error

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(guarded, range(processes)))


def seatings(store, refusals, owners=OWNERS, patience_s=10):
    return in_all(lambda me: Seating(owners, me, store.board, refusals[me], patience_s))


def file_with(text):
    fd = os.memfd_create("piece")
    os.write(fd, text.encode())
    return fd


def text_of(fd):
    text = os.pread(fd, 1000, 0).decode()
    os.close(fd)
    return text


def test_file_descriptors_reach_all(monkeypatch):
    said = []
    monkeypatch.setattr("jax_mok.runtime.sharing.say_once", said.append)
    seated = seatings(Store(), [NO_FABRIC, CAN, CAN])
    assert [s.way for s in seated] == [FILES] * 3
    assert "fabric handles were refused (process 0: the CUDA driver refused it)" in said[0]
    for piece in ("front/0", "rows/0", "rows/2097152"):

        def share(me, piece=piece):
            mine = [file_with(f"{piece} of {me}.{gpu}") for gpu in range(2)]
            found = seated[me].share(piece, 2**21, mine, 10)
            assert all(text_of(fd).startswith(f"{piece} of {me}") for fd in mine)  # still the caller's
            return [fd if fd is None else text_of(fd) for fd in found]

        for me, found in enumerate(in_all(share)):
            want = [f"{piece} of {p}.{gpu}" for p in range(3) for gpu in range(2)]
            assert found == [None if int(text[-3]) == me else text for text in want]


def test_fabric_handles_reach_all():
    seated = seatings(Store(), [CAN] * 3)
    assert [s.way for s in seated] == [FABRIC] * 3
    found = in_all(lambda me: seated[me].share("rows/0", 2**21, [bytes([me, gpu]) * 32 for gpu in range(2)], 10))
    assert found[1] == [b"\0\0" * 32, b"\0\1" * 32, None, None, b"\2\0" * 32, b"\2\1" * 32]


def test_what_nobody_can_do_is_refused_by_all():
    neither = {FABRIC: "no IMEX channel", FILES: "no permission"}
    for error in seatings(Store(), [CAN, neither, NO_FABRIC]):
        assert isinstance(error, RuntimeError)
        assert "process 1: no IMEX channel; process 2: the CUDA driver refused it" in str(error)
        assert "process 1: no permission" in str(error)


def test_processes_of_several_hosts_need_fabric_handles(monkeypatch):
    hosts = iter(["a", "b", "b"])
    monkeypatch.setattr("jax_mok.runtime.sharing._host", lambda: next(hosts))
    for error in seatings(Store(), [NO_FABRIC] * 3):
        assert isinstance(error, RuntimeError)
        assert "several hosts" in str(error)
        assert "process 0: the CUDA driver refused it" in str(error)


def test_another_size_is_refused_by_all():
    seated = seatings(Store(), [CAN] * 3)
    for error in in_all(lambda me: seated[me].share("rows/0", 100 + me // 2, [b"a", b"b"], 10)):
        assert isinstance(error, RuntimeError)
        assert "in the same order" in str(error)
        assert "{0: 100, 1: 100, 2: 101}" in str(error)


def test_a_process_without_memory_is_named_by_all():
    seated = seatings(Store(), [NO_FABRIC] * 3)
    fds = [file_with("x"), file_with("y")]
    for error in in_all(lambda me: seated[me].share("rows/0", -1 if me == 1 else 100, [] if me == 1 else fds, 10)):
        assert isinstance(error, RuntimeError)
        assert "processes [1] could not make theirs" in str(error)


def test_letters_that_do_not_come_leave_no_descriptors():
    seated, before = seatings(Store(), [NO_FABRIC] * 3), len(os.listdir("/proc/self/fd"))
    address = seated[0]._mailbox.address
    for text in (b"", b"not a letter"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(b"\0" + address.encode())
            fd = file_with("junk")
            if text:
                socket.send_fds(stranger, [text], [fd])
            os.close(fd)
    fds = [file_with("x"), file_with("y")]
    Mailbox.send(address, f"{seated[0].name}/rows/0", 1, fds)  # of process 2 there is none
    letters = {1: {"address": seated[1]._mailbox.address}, 2: {"address": seated[2]._mailbox.address}}
    with pytest.raises(TimeoutError, match="process 2 did not send"):
        seated[0]._trade(seated[0]._mailbox, f"{seated[0].name}/rows/0", letters, fds, 0.3)
    for fd in fds:
        os.close(fd)
    for seating in seated:
        seating.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_that_does_not_come_is_named():
    store = Store()
    for error in in_all(lambda me: Seating(OWNERS, me, store.board, CAN, 0.3), processes=2):
        assert isinstance(error, TimeoutError)
        assert "process 2 did not come within 0.3 s" in str(error)


def test_other_lists_of_gpus_have_other_names():
    assert name_of(OWNERS) == name_of([*OWNERS])
    assert len({name_of(OWNERS), name_of(OWNERS[::-1]), name_of(OWNERS[:4])}) == 3


class Device(NamedTuple):
    id: int
    process_index: int


def test_devices_that_exchange_rows_are_linked(monkeypatch):
    a, b, c = ([Device(2 * p + i, p) for i in range(2)] for p in range(3))
    for me in range(2):
        monkeypatch.setattr(jax, "process_index", lambda me=me: me)
        assert processes._linked([[a[0], b[0]], [a[1], b[1]], c]) == [*a, *b]
        assert processes._linked([[*b, *a], c]) == [*a, *b]
        assert processes._linked([[*a, b[0]], [b[1], *c]]) == []  # process 2 would not know of a failure in the first
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert processes._linked([[a[0], b[0]], [a[1], b[1]], c]) == c


def test_the_latest_call_is_agreed_on(monkeypatch):
    seated = seatings(Store(), [CAN] * 3)
    assert in_all(lambda me: seated[me].agree(1, [9, 12, 8][me])) == [12] * 3
    monkeypatch.setattr("jax_mok.runtime.sharing._AGREEMENT_S", 0.3)
    assert in_all(lambda me: seated[me].agree(2, 21), processes=2) == [0, 0]


def test_descriptors_of_strangers_are_not_taken(monkeypatch):
    seated = seatings(Store(), [NO_FABRIC] * 3)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for error in in_all(lambda me: seated[me].share("rows/0", 1, [file_with("x"), file_with("y")], 0.3)):
        assert isinstance(error, (TimeoutError, RuntimeError))


@pytest.mark.gpu
def test_memory_of_this_gpu_can_be_shared():
    from jax_mok import runtime

    assert runtime.native().cuda_sharing_refusal(0, FILES) == ""
