"""Servers and clients of gRPC and QUIC for traffic.sh.

traffic.py grpc-server ADDRESS...                       port 50051
traffic.py grpc-client ADDRESS:PORT SECONDS STREAMS
traffic.py quic-server ADDRESS CERTIFICATE KEY          port 4433
traffic.py quic-client ADDRESS PORT SECONDS STREAMS

The streams of a client stay for the whole time; beside them, it opens short streams one after the other. Each server
answers a message with its name and the message. A client prints: requests, failures, p50 and p99 in milliseconds. Failures
are requests without a right answer, and streams whose server changes.
"""

import asyncio
import os
import sys
import time


class Tally:
    """Counts the requests of all streams, and keeps their times."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.times = []
        self.failed = 0

    def goes_on(self):
        return time.monotonic() < self.end

    def failure(self, what):
        self.failed += 1
        print(f"{time.strftime('%T')} {what}", file=sys.stderr)

    def report(self):
        times = sorted(self.times) or [0]
        p50, p99 = (1000 * times[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.99))
        print(f"{len(self.times) + self.failed} {self.failed} {p50:.3f} {p99:.3f}")


async def talk(tally, what, call, limit=None):
    """Sends messages on one stream: `call` returns the answer to a message."""
    server, number = None, 0
    while tally.goes_on() and number != limit:
        number += 1
        begin = time.monotonic()
        try:
            answer = await asyncio.wait_for(call(f"{number}".encode()), 10)
        except Exception as error:  # Any error is a failure of the request, and ends the stream.
            return tally.failure(f"{what}, message {number}: {error!r}")
        tally.times.append(time.monotonic() - begin)
        name, _, echo = answer.decode().partition(" ")
        if echo != f"{number}" or name != (server or name):
            return tally.failure(f"{what}, message {number}: {answer!r} from {name}, before from {server}")
        server = name
        await asyncio.sleep(0.005)


async def all_streams(seconds, streams, connected):
    """Runs `streams` long streams, and short ones one after the other; `connected` is a context of one connection."""
    tally = Tally(seconds)

    async def stream(what, limit):
        try:
            async with connected() as call:
                await talk(tally, what, call, limit)
        except Exception as error:
            tally.failure(f"{what}: {error!r}")

    async def short():
        while tally.goes_on():
            await stream("a short stream", 3)

    await asyncio.gather(short(), *(stream(f"stream {number}", None) for number in range(streams)))
    tally.report()


def grpc_parts():
    import contextlib

    import grpc

    async def answer(requests, _):
        async for request in requests:
            yield os.environ["POD"].encode() + b" " + request

    async def serve(*addresses):
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("traffic", {"Talk": handler}),))
        for address in addresses:
            server.add_insecure_port(f"{address}:50051")
        await server.start()
        await server.wait_for_termination()

    @contextlib.asynccontextmanager
    async def connected(target):
        # Without the option, all channels of a process share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options) as channel:
            call = channel.stream_stream("/traffic/Talk")()

            async def message(text):
                await call.write(text)
                return await call.read()

            yield message
            await call.done_writing()

    async def client(target, seconds, streams):
        await all_streams(float(seconds), int(streams), lambda: connected(target))

    return serve, client


def quic_parts():
    import contextlib
    import ssl

    from aioquic.asyncio import connect, serve
    from aioquic.quic.configuration import QuicConfiguration

    def answer(reader, writer):
        async def echo():
            while line := await reader.readline():
                writer.write(os.environ["POD"].encode() + b" " + line)

        asyncio.ensure_future(echo())

    async def server(address, certificate, key):
        configuration = QuicConfiguration(is_client=False, alpn_protocols=["traffic"])
        configuration.load_cert_chain(certificate, key)
        await serve(address, 4433, configuration=configuration, stream_handler=answer)
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def connected(address, port):
        configuration = QuicConfiguration(alpn_protocols=["traffic"], verify_mode=ssl.CERT_NONE)
        async with connect(address, int(port), configuration=configuration) as client:
            reader, writer = await client.create_stream()

            async def message(text):
                writer.write(text + b"\n")
                return (await reader.readline()).rstrip()

            yield message

    async def client(address, port, seconds, streams):
        await all_streams(float(seconds), int(streams), lambda: connected(address, port))

    return server, client


if __name__ == "__main__":
    protocol, _, role = sys.argv[1].partition("-")
    parts = {"grpc": grpc_parts, "quic": quic_parts}[protocol]()
    asyncio.run(parts[role == "client"](*sys.argv[2:]))
