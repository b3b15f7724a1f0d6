"""Runs [code, test], JSON on its input, within limits. rewards.run_test starts it with (seconds, token).

No sockets, no other processes, no file outside of the folder but Python's own, 1 GB of memory, files of 10 MB. The
token is printed behind the code's own output when the code has run to its end.
"""
import io, json, os, resource, sys
token, seconds, folder = sys.argv.pop(), int(sys.argv.pop()), os.getcwd()
for kind, most in {"CPU": seconds, "AS": 1 << 30, "FSIZE": 10 << 20, "NPROC": 0, "NOFILE": 64}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
readable = (folder, *map(os.path.realpath, (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))))
closed = ("os", "socket", "subprocess", "ctypes", "pty", "gc", "resource", "mmap", "signal", "shutil")


def guard(event, args):
    refused = event.split(".")[0] in closed and event not in ("os.listdir", "os.scandir")
    if event == "open" and not isinstance(args[0], int):
        writes = not isinstance(args[2], int) or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        refused = not os.path.realpath(os.fsdecode(args[0])).startswith(folder if writes else readable)
    if refused:
        raise PermissionError(event + " is closed")


code, test = json.load(sys.stdin)
if isinstance(test, dict):
    sys.stdin = io.StringIO(str(test["input"]))
else:
    code += "\n" + test
program = compile(code, "answer.py", "exec")
sys.addaudithook(guard)
exec(program, {"__name__": "__main__"})
print("\n" + token)
