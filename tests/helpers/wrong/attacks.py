"""Attacks on the grader: a function body for each problem. `refused` lists the attacks that succeeded.

ROOT, SENTINEL and SUBMISSION are paths: the grader's repository, a file in its course/, the submitted folder.
"""
HELPERS = '''
import ctypes, json, os, pathlib, safetensors.torch, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def c(name, *args):
    if getattr(libc, name)(*(x.encode() if isinstance(x, str) else x for x in args)) == -1:
        raise OSError(ctypes.get_errno(), name)

def fork():
    pid = libc.fork()
    if pid == 0:
        os._exit(0)
    if pid == -1:
        raise OSError

def refused(**attacks):
    went_through = []
    for name, attack in attacks.items():
        try:
            attack()
            went_through.append(name)
        except BaseException:
            pass
    raise RuntimeError(f"went through: {went_through}")

def say(data):
    """Write to every open file and socket."""
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass

def forge(text):
    data = safetensors.torch.save({'json': torch.frombuffer(bytearray(text), dtype=torch.uint8)})
    say(struct.pack('!i', len(data)) + data)
'''
ATTACKS = {
    "chunks.grid": """refused(
        hidden=lambda: open(f"{ROOT}/course/chunks/hidden.py").read(),
        reference=lambda: pathlib.Path(f"{ROOT}/methods/chunk_kv.py").read_text(),
        reference_in_c=lambda: c("open", f"{ROOT}/methods/chunk_kv.py", 0),
        root=lambda: open(f"/proc/self/root{ROOT}/README.md"), listing=lambda: os.listdir(ROOT),
        grader=lambda: open(f"/proc/{os.getppid()}/mem", "rb"), expect=lambda: __import__("course.expect"),
        plugin=lambda: __import__("course.grader"),
        remove=lambda: os.remove(SENTINEL), remove_path=lambda: pathlib.Path(SENTINEL).unlink(),
        remove_in_c=lambda: c("unlink", SENTINEL), write=lambda: open(SENTINEL, "w"),
        write_in_c=lambda: c("open", SENTINEL, 1), truncate=lambda: c("truncate", SENTINEL, 0),
        mode=lambda: os.chmod(SENTINEL, 0), mode_in_c=lambda: c("chmod", SENTINEL, 0),
        time=lambda: os.utime(SENTINEL), time_in_c=lambda: c("utime", SENTINEL, None),
        rename=lambda: os.rename(SENTINEL, SENTINEL + "2"), rename_in_c=lambda: c("rename", SENTINEL, "x"),
        submission=lambda: c("unlink", f"{SUBMISSION}/methods/chunk_kv.py"),
        tmp=lambda: open("/tmp/x", "w"), scratch=lambda: open("methods/chunk_kv.py", "a"),
        link=lambda: c("symlink", SENTINEL, "output"),
        pipe=lambda: c("mkfifo", "output", 0o600), results=lambda: c("creat", "results.json", 0o600),
        library_mode=lambda: os.fchmod(os.open(torch.__file__, os.O_RDONLY), 0o600),
        connect=lambda: socket.create_connection(("127.0.0.1", 9)), tcp=lambda: c("socket", 2, 1, 0),
        udp=lambda: c("socket", 2, 2, 0), unix=lambda: c("socket", 1, 1, 0), fork=os.fork, fork_in_c=fork,
        run=lambda: os.system("true"), run_in_c=lambda: 1 // (libc.system(b"true") == 0),
        kill=lambda: os.kill(os.getppid(), 9), kill_in_c=lambda: c("kill", os.getppid(), 9),
        queued=lambda: c("syscall", 129, os.getppid(), 9, bytes(128)),
        trace=lambda: c("ptrace", 16, os.getppid()),
        limits=lambda: c("prlimit", os.getppid(), 0, bytes(16), None),
        memory=lambda: c("shmget", 0, 99, 0o1600),
        too_much=lambda: torch.empty(3 * 2 ** 30, dtype=torch.uint8), environment=lambda: os.environ["PATH"],
        hidden_memory=lambda: c("memfd_create", "x", 0), root_rights=lambda: c("chroot", "."))""",
    "chunks.chunk_scores": """
        print('passed')
        raised = dict.fromkeys(('kind', 'message', 'where', 'trace'), '')
        forge(json.dumps({'dict': {'raised': {'dict': raised}}}).encode())
        os._exit(0)""",
    "chunks.ranking": """
        order = score.shape[-1] - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        score.zero_()
        return order""",
    "chunks.cut_to": """
        end = time.monotonic() + 8  # more than --seconds 2, less than its default
        while time.monotonic() < end:
            pass""",
    "chunks.fit": "say(struct.pack('!i', 1000) + b'half'); time.sleep(1000)",
    "chunks.reuse": "sys.exit('\\udcff')",
    "sketch.hash": "return torch.ones(10 ** 11, dtype=torch.uint8)",
    "sketch.slots": "return torch.zeros(2 ** 24, dtype=torch.int64)",
    "sketch.insert": "raise ValueError('\\ud800 \\x1b[2J' + 10 ** 6 * 'x')",
    "sketch.median": """
        torch.equal = torch.allclose = torch.Tensor.__eq__ = lambda *a, **k: True
        for text in (b'{}', b'null', b'{"dict": {"value": 1, "changed": 3}}', 10 ** 6 * b'['):
            forge(text)
        os._exit(0)""",
    "sketch.variance": "return object()",
    "sketch.means": """
        threading.Thread(target=lambda: time.sleep(1000)).start()
        os.closerange(0, 100)
        return 1""",
    "sketch.shrink": "return [float('nan'), {'value': torch.tensor([])}, 'x' * 10 ** 6]",
}
