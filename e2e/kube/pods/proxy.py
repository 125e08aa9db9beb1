"""A TCP proxy in front of the API server. Usage: PORT."""

import asyncio
import contextlib
import os
import sys

TARGET = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])


async def pump(reader, writer):
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(reader, writer):
    try:
        there, back = await asyncio.open_connection(*TARGET)
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, back), pump(there, writer))


async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
