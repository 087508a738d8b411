# Stands for a process that tests/warm_python.py starts; imports little, as it is started often.

import os
import signal
import socket
import sys

ADDRESS = "@ADDRESS@"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def find_arguments() -> list[str]:
    """Return the arguments of Python: a script such as pytest is one of the real Python's directory."""
    name = os.path.basename(sys.argv[0])  # noqa: PTH119
    if name.startswith("python"):
        return sys.argv[1:]
    return [os.path.join(os.path.dirname(sys.executable), name), *sys.argv[1:]]  # noqa: PTH118, PTH120


def is_known(arguments: list[str]) -> bool:
    """Tell whether a fork can do what Python does with its arguments."""
    first = next((argument for argument in arguments if argument not in ("-u", "-B")), "-")
    return first in ("-c", "-m") or not first.startswith("-")


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def main() -> None:
    arguments = find_arguments()
    if not is_known(arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(ADDRESS)
        variables = [name + b"=" + value for name, value in os.environb.items()]
        files = [number for number in range(253) if number != connection.fileno() and is_open(number)]
        texts = [os.getcwd(), " ".join(map(str, files)), str(len(arguments)), *arguments]  # noqa: PTH109
        content = b"\0".join([*map(os.fsencode, texts), *variables])
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], files)
        connection.sendall(content)
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: connection.send(bytes([number])))
        status = int(connection.recv(16) or 1)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
