"""Tries to connect to each HOST:PORT of its arguments, five times at most, and prints which did
answer: a line of JSON, {"host:port": bool}."""

import json
import socket
import sys
import time


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


found = dict.fromkeys(sys.argv[1:], False)
for _ in range(5):
    for target in [target for target, there in found.items() if not there]:
        host, _, port = target.rpartition(":")
        found[target] = answers(host, int(port))
    if all(found.values()):
        break
    time.sleep(1)
print(json.dumps(found), flush=True)
