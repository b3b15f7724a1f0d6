"""Runs [code, tests], JSON on its input, and prints the share of the tests that the code passes.

rewards.code_score starts it in an empty folder with the seconds that all tests have together. A test is Python text
run behind the code, or {"input": stdin, "output": stdout}; each has its own process and folder. No sockets, no other
processes, no file outside of that folder but Python's own, 1 GB of memory, files of 10 MB: this keeps out accidents
and cheap tricks; against attacks run it all in a container.
"""
import json, os, resource, signal, sys, time
LIMITS = {"AS": 1 << 30, "FSIZE": 10 << 20, "NPROC": 0, "NOFILE": 64}
CLOSED = ("os", "socket", "subprocess", "ctypes", "pty", "gc", "resource", "mmap", "signal", "shutil")
readable = [os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))]


def guard(event, args):
    refused = event.split(".")[0] in CLOSED and event not in ("os.listdir", "os.scandir")
    if event == "open" and not isinstance(args[0], int):
        writes = not isinstance(args[2], int) or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        allowed = (folder,) if writes else (folder, *readable)
        refused = not os.path.realpath(os.fsdecode(args[0])).startswith(allowed)
    if refused:
        raise PermissionError(event + " is closed")


code, tests = json.load(sys.stdin)
tests = tests if isinstance(tests, list) else [tests]
passed, deadline = 0, time.monotonic() + float(sys.argv.pop())
for number, test in enumerate(tests):
    asked = isinstance(test, dict)              # by standard input; else the code has to reach its end: the token
    token, folder = os.urandom(16).hex(), os.path.realpath(str(number)) + os.sep
    os.mkdir(folder)
    with open(f"{number}.in", "w+", errors="replace") as given, open(f"{number}.out", "w+b") as printed:
        given.write(str(test["input"]) if asked else "")
        given.seek(0)
        child = os.fork()
        if not child:
            os.dup2(given.fileno(), 0)
            os.dup2(printed.fileno(), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            break                               # out of the loop, to run the code
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.001)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        printed.seek(0)
        text, finished, _ = printed.read(1 << 20).decode(errors="replace").partition("\n" + token)
    right = text.split() == str(test["output"]).split() if asked else finished
    passed += bool(right and ended == (child, 0))
else:
    sys.exit(print(passed / len(tests)))

sys.stdin = open(0)
os.chdir(folder)
for kind, most in (LIMITS | {"CPU": max(1, round(deadline - time.monotonic()))}).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
program = compile(code if asked else code + "\n" + test, "answer.py", "exec")
del test, tests
sys.addaudithook(guard)
exec(program, {"__name__": "__main__"})
print("\n" + token)
