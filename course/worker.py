"""The process that runs a submission: it is asked by the grader, and never sees a test or an expected value.

`python worker.py FD` imports torch once and then forks for each problem it is told of on that socket. The fork
locks itself in before it reads a line of the submission: Linux's Landlock leaves it the libraries to read, a
folder of its own to write, no TCP and no signals to others; limits bound its memory, processor time and files.
Where there is no Landlock (macOS, Linux before 5.13) only Python's audit hook refuses files and sockets, which
a determined student can get round: grade inside a container there.
"""
import ctypes
from importlib import import_module
import json
from multiprocessing.connection import Connection
import os
from pathlib import Path
import platform
import resource
import signal
import socket
import sys
import traceback

import torch
from wire import packed, unpacked  # as a script beside it: the package `course` is to be the submission's

GiB = 2 ** 30
LIMITS = {  # beside what the process has when it is made
    "memory": 2 * GiB,  # bytes of address space
    "seconds": 120,     # of processor time, for all tests of a problem
    "file": GiB // 64,  # bytes that a file may grow to
}


def serve(folder: str, package: str, connection: Connection):
    """Answer calls of course/PACKAGE/adapter.py in `folder`, a copy of the repository with one submitted
    function, until the grader closes the connection.
    """
    sys.path[0] = folder  # in place of course/
    os.chdir(folder)
    os.environ.clear()
    torch.set_num_threads(1)
    lock_in(folder)
    adapter = None
    while True:
        try:
            call = unpacked(connection.recv_bytes())
        except EOFError:
            return
        try:
            adapter = adapter or import_module(f"course.{package}.adapter")
            given = unpacked(packed(call["args"]))
            value = getattr(adapter, call["call"])(**call["args"])
            changed = [name for name, x in given.items()
                       if isinstance(x, torch.Tensor) and not torch.equal(x, call["args"][name])]
            answer = packed(dict(value=value, changed=changed))
        except BaseException as error:
            answer = packed(dict(raised=raised(error, folder)))
        connection.send_bytes(answer)


def raised(error: BaseException, folder: str) -> dict:
    """What the error is, the line of the submission where it arose, and the traceback as a student needs it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f.filename.startswith(folder) and "/course/" not in f.filename]
    where = f"line {inside[-1].lineno} of {Path(inside[-1].filename).name}" if inside else ""
    return dict(kind=type(error).__name__, message=str(error)[:2000], where=where,
                trace="".join(traceback.format_list(inside)).replace(folder + "/", "")[:4000])


def lock_in(folder: str):
    os.setsid()  # a group of its own: the grader kills all of it
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") \
        if os.path.exists("/proc/self/statm") else 16 * GiB
    for what, most in ((resource.RLIMIT_AS, used + LIMITS["memory"]), (resource.RLIMIT_CPU, LIMITS["seconds"]),
                       (resource.RLIMIT_FSIZE, LIMITS["file"]), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    libraries = [*{os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path != folder}]
    if landlock() >= 4:
        restrict({folder: READ | WRITE, **dict.fromkeys([*libraries, *SYSTEM], READ), "/dev/null": READ | WRITE_FILE})
    sys.addaudithook(refuse(folder, libraries))


REFUSED = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "os.system",
           "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill", "os.killpg")
TOUCHED = "open", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", \
    "os.listdir", "os.scandir", "os.mkdir", "shutil.rmtree"


def refuse(folder: str, libraries: list[str]):
    """An audit hook: PermissionError for the network, other processes, and files that are nobody's business."""
    roots = [*(Path(x) for x in libraries + list(SYSTEM)), Path("/dev/null")]
    own = Path(os.path.realpath(folder))

    def hook(event: str, args: tuple):
        if event in REFUSED:
            raise PermissionError(f"{event} is not allowed in a submission")
        if event in TOUCHED and args and isinstance(args[0], (str, bytes)):
            path = Path(os.path.realpath(os.fsdecode(args[0])))
            reads = event in ("os.listdir", "os.scandir") or event == "open" and not (
                args[1] and set(args[1]) & set("wax+")) and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if not path.is_relative_to(own) and not (reads and any(path.is_relative_to(x) for x in roots)) \
                    and path != Path("/dev/null"):
                raise PermissionError(f"{event} of {path} is not allowed in a submission")
    return hook


# ---- Landlock: linux/landlock.h. No library for it is past its alpha ---------------------------------------------

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
ALL_FILES = 2 ** 15 - 1  # every right of version 3: remove, make, refer and truncate too
WRITE = ALL_FILES & ~READ
TCP = 0b11               # bind and connect, from version 4 on
SCOPED = 0b11            # abstract sockets and signals, from version 6 on
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/proc/self",
          "/proc/cpuinfo", "/sys/devices/system/cpu")  # PyTorch asks for these when it first computes in 16 bits


def syscall(number: int, *args) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(ctypes.c_long(number), *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def landlock() -> int:
    """Landlock's version, 0 where there is none."""
    if platform.system() != "Linux":
        return 0
    try:
        return syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict(allowed: dict[str, int]):
    """From here on this process and its children have these rights below these paths, and none elsewhere."""
    class Ruleset(ctypes.Structure):
        _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    scoped = landlock() >= 6
    rules = Ruleset(ALL_FILES, TCP, SCOPED if scoped else 0)
    ruleset = syscall(444, ctypes.byref(rules), ctypes.c_size_t(24 if scoped else 16), ctypes.c_uint32(0))
    for path, rights in allowed.items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE
        syscall(445, ruleset, 1, ctypes.byref(Beneath(rights, fd)), ctypes.c_uint32(0))
        os.close(fd)
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    syscall(446, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


def main():
    """Fork for each order on the socket: JSON with what `serve` takes, and the file that it is to answer on."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, fds, *_ = socket.recv_fds(control, 65536, 2)
        if not order:
            return
        child = os.fork()
        if not child:
            control.close()
            answers, output = fds
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                serve(**json.loads(order), connection=Connection(answers))
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.send(str(child).encode())


if __name__ == "__main__":
    main()
