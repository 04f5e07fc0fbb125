"""Messages between the judge and the process that runs a submission.

One JSON object a frame: 4 bytes of length, 32 bytes of HMAC-SHA256, the payload. The key is fresh for each run and is
sent before any user code is loaded; the frame number and the direction are part of the HMAC, so a frame can be neither
forged, replayed nor dropped. Nothing the submission prints can end up here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from typing import Any

KEY_BYTES = 32
_DIGEST_BYTES = 32
#: A message is a few numbers and a bounded text; anything longer was not written by the worker.
_MAX_PAYLOAD_BYTES = 1 << 20

Message = dict[str, Any]


class ForgedFrameError(Exception):
    """Bytes on the channel that the other side did not sign."""


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of the authenticated channel.

    Args:
        sock: connected stream socket.
        key: the run's secret, 32 bytes.
        side: "judge" or "worker".
    """

    def __init__(self, sock: socket.socket, key: bytes, side: str) -> None:
        self._sock = sock
        self._key = key
        self._side = side
        self._sent = 0
        self._received = 0
        self._buffer = b""
        # A forked copy of the worker must not speak for it.
        self._owner = os.getpid()

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: if nobody listens any more, or from a forked copy of the owner.
        """
        if os.getpid() != self._owner:
            raise ChannelClosedError("only the process that opened the channel may write to it")
        payload = json.dumps(message).encode()
        frame = len(payload).to_bytes(4, "big") + self._digest(self._side, self._sent, payload) + payload
        self._sent += 1
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ChannelClosedError: at the end of the stream.
            ForgedFrameError: for bytes that the other side did not sign.
        """
        while True:
            message = self.poll()
            if message is not None:
                return message
            self.fill()

    def fill(self) -> None:
        """Read what is there into the buffer.

        Raises:
            ChannelClosedError: at the end of the stream.
        """
        try:
            data = self._sock.recv(1 << 16)
        except OSError as error:
            raise ChannelClosedError(str(error)) from None
        if not data:
            raise ChannelClosedError("end of stream")
        self._buffer += data

    def poll(self) -> Message | None:
        """The next complete message in the buffer, if there is one.

        Raises:
            ForgedFrameError: for bytes that the other side did not sign.
        """
        if len(self._buffer) < 4:
            return None
        length = int.from_bytes(self._buffer[:4], "big")
        if length > _MAX_PAYLOAD_BYTES:
            raise ForgedFrameError(f"a frame claims {length} bytes")
        end = 4 + _DIGEST_BYTES + length
        if len(self._buffer) < end:
            return None
        digest, payload = self._buffer[4 : 4 + _DIGEST_BYTES], self._buffer[4 + _DIGEST_BYTES : end]
        other = "worker" if self._side == "judge" else "judge"
        if not hmac.compare_digest(digest, self._digest(other, self._received, payload)):
            raise ForgedFrameError(f"frame {self._received} has no valid signature")
        self._buffer = self._buffer[end:]
        self._received += 1
        message: Message = json.loads(payload)
        return message

    def _digest(self, side: str, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + payload, hashlib.sha256)
