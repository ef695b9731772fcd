"""GPU memory that the processes of a job share: who takes part, in which way, and how the handles get there.

What all must know goes through the key-value store of jax.distributed. Fabric handles are bytes and go the same way;
file descriptors go from process to process by Unix sockets, which the processes of a host can reach."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from jax_mok._say import say_once

FABRIC: Final = "fabric handles"
FILES: Final = "file descriptors"
ELSEWHERE: Final = -1  # in the place of a CUDA ordinal: a GPU of another process

_IN_ORDER = "all processes must compile the same programs that contain the layer, in the same order"
_MOST_HANDLES = 128
_LONGEST_NAME = 1024  # bytes
_LETTER_S = 5.0  # from the connection to the letter
_AGREEMENT_S = 10.0  # the processes have a thread each that does nothing but answer


class Board(NamedTuple):
    """The key-value store: ``post(name, text)``; ``read(name, seconds)`` waits, and returns ``None`` if in vain."""

    post: Callable[[str, str], None]
    read: Callable[[str, float], str | None]


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Mailbox:
    """Takes file descriptors from other processes of this host and user."""

    def __init__(self) -> None:
        self.address = f"jax_mok-{secrets.token_hex(16)}"  # in the abstract namespace: nothing is left behind
        self._letters: dict[tuple[str, int], list[int]] = {}
        self._news = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0" + self.address.encode())
        self._socket.listen(_MOST_HANDLES)
        threading.Thread(target=self._receive, daemon=True, name="jax_mok mailbox").start()

    def _receive(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or too many open files: then the sender's letter is missed, and that is said
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)
                continue
            with connection:
                self._take_letter(connection)

    def _take_letter(self, connection: socket.socket) -> None:
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            return
        connection.settimeout(_LETTER_S)
        fds: list[int] = []
        try:
            text, fds, _, _ = socket.recv_fds(connection, _LONGEST_NAME, _MOST_HANDLES)
            name, sender = json.loads(text)
        except (OSError, ValueError):  # a process that ended on the way
            _close(fds)
            return
        with self._news:
            self._letters[name, sender] = fds
            self._news.notify_all()

    def close(self) -> None:
        """Takes no more letters, and throws those away that nobody took."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait in accept
        self._socket.close()
        with self._news:
            _close(itertools.chain(*self._letters.values()))
            self._letters.clear()

    def take(self, name: str, sender: int, seconds: float) -> list[int]:
        """The descriptors that ``sender`` has sent by this name, now the caller's. Raises ``TimeoutError``."""
        with self._news:
            if not self._news.wait_for(lambda: (name, sender) in self._letters, seconds):
                raise TimeoutError(f"process {sender} did not send {name} within {seconds:g} s")
            return self._letters.pop((name, sender))

    @staticmethod
    def send(address: str, name: str, sender: int, fds: Sequence[int]) -> None:
        """Puts copies of descriptors into another process's mailbox. They stay the caller's."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_LETTER_S)
            connection.connect(b"\0" + address.encode())
            socket.send_fds(connection, [json.dumps([name, sender]).encode()], list(fds))


def name_of(owners: Sequence[tuple[int, int]]) -> str:
    """Of the GPUs, given by process and number: the same in all processes that list them alike."""
    processes = ",".join(map(str, sorted({process for process, _ in owners})))
    return f"gpus/{processes}/{hashlib.sha256(json.dumps(owners).encode()).hexdigest()[:16]}"


class Seating:
    """GPUs of several processes that map each other's memory.

    **Arguments**

    - ``owners``: process and number of each GPU, in an order that is the same in all processes.
    - ``me``: this process.
    - ``board``: see :class:`Board`.
    - ``refusals``: why this process cannot share memory by :data:`FABRIC` and by :data:`FILES`; ``""`` = it can.
    - ``patience_s``: for how long the others are waited for.

    Raises ``RuntimeError`` in all of them if there is no way that all can go; ``TimeoutError`` if one does not come, or
    lists other GPUs.
    """

    def __init__(
        self,
        owners: Sequence[tuple[int, int]],
        me: int,
        board: Board,
        refusals: dict[str, str],
        patience_s: float,
    ) -> None:
        self.me, self.owners, self._board = me, [process for process, _ in owners], board
        self.processes = sorted(set(self.owners))
        self.name = name_of(owners)
        hello = {"refusals": refusals, "host": _host()}
        found = [json.loads(text) for text in self._gather("hello", json.dumps(hello), patience_s)]
        self.way = self._common_way(found)
        self._mailbox = Mailbox() if self.way == FILES else None

    def _common_way(self, found: list[dict[str, Any]]) -> str:
        refusals = {way: self._refusal(way, found) for way in (FABRIC, FILES)}
        if not refusals[FILES] and len({one["host"] for one in found}) > 1:
            refusals[FILES] = "the processes are on several hosts, or in containers with networks of their own"
        if not refusals[FABRIC]:
            return FABRIC
        if not refusals[FILES]:
            say_once(f"jax_mok: memory of GPUs is shared by {FILES}; {FABRIC} were refused ({refusals[FABRIC]}).")
            return FILES
        reasons = "; ".join(f"by {way}: {why}" for way, why in refusals.items())
        raise RuntimeError(f"processes {self.processes} cannot share memory of their GPUs, neither {reasons}")

    def _refusal(self, way: str, found: list[dict[str, Any]]) -> str:
        refused = {p: one["refusals"][way] for p, one in zip(self.processes, found, strict=True)}
        return "; ".join(f"process {p}: {why}" for p, why in refused.items() if why)

    def _gather(self, topic: str, text: str, patience_s: float) -> list[str]:
        """What each process has said on a topic, once all have. Raises ``TimeoutError``."""
        self._board.post(f"{self.name}/{topic}/{self.me}", text)
        deadline, found = time.monotonic() + patience_s, []
        for process in self.processes:
            said = self._board.read(f"{self.name}/{topic}/{process}", max(0.001, deadline - time.monotonic()))
            if said is None:
                raise TimeoutError(
                    f"process {process} did not come within {patience_s:g} s to share memory of its GPUs; {_IN_ORDER}"
                )
            found.append(said)
        return found

    def share(self, piece: str, size: int, handles: Sequence[Any], patience_s: float) -> list[Any]:
        """Handles of a piece of memory of ``size`` bytes on each GPU: gives those of this process, returns the others',
        ``None`` in the places of its own. A size of -1 says that this process could not make its memory. Raises
        ``TimeoutError``, or in all of them ``RuntimeError`` if one could not, or if sizes differ."""
        letter: dict[str, Any] = {"bytes": size}
        if self._mailbox is None:
            letter["handles"] = [handle.hex() for handle in handles]
        else:
            letter["address"] = self._mailbox.address
        found = map(json.loads, self._gather(piece, json.dumps(letter), patience_s))
        letters = dict(zip(self.processes, found, strict=True))
        sizes = {process: one["bytes"] for process, one in letters.items()}
        without = [process for process, size in sizes.items() if size < 0]
        if without:
            raise RuntimeError(f"no memory of GPUs is shared: processes {without} could not make theirs, and say why")
        if len(set(sizes.values())) > 1:
            raise RuntimeError(f"processes ask for arenas of different sizes ({sizes} bytes by process); {_IN_ORDER}")
        del letters[self.me]
        if self._mailbox is None:
            theirs = {process: [bytes.fromhex(h) for h in one["handles"]] for process, one in letters.items()}
        else:
            theirs = self._trade(self._mailbox, f"{self.name}/{piece}", letters, handles, patience_s)
        return [None if process == self.me else theirs[process].pop(0) for process in self.owners]

    def _trade(
        self, mailbox: Mailbox, name: str, letters: dict[int, Any], fds: Sequence[int], patience_s: float
    ) -> dict[int, list[int]]:
        for process, letter in letters.items():
            try:
                Mailbox.send(letter["address"], name, self.me, fds)
            except OSError as error:
                raise RuntimeError(f"process {process} takes no memory of GPUs by {FILES}: {error}") from error
        deadline, found = time.monotonic() + patience_s, dict[int, list[int]]()
        try:
            for process in letters:
                found[process] = mailbox.take(name, process, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            _close(itertools.chain(*found.values()))
            raise
        return found

    def agree(self, number: int, following: int) -> int:
        """The latest of the calls that each process would make next when it hears of a failure; ``number`` counts the
        failures. 0 if one of them does not answer."""
        try:
            return max(map(int, self._gather(f"failure/{number}", str(following), _AGREEMENT_S)))
        except TimeoutError:
            return 0

    def close(self) -> None:
        """Takes no more part."""
        if self._mailbox is not None:
            self._mailbox.close()


def _host() -> str:
    """The same for processes that can reach each other by Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
