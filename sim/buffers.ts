/**
 * Small buffers between the gateway and a stand-in. A kernel accepts megabytes at once on loopback, so no request would
 * ever stop in the middle of a head. Where `net.Socket.prototype._writeGeneric` exists, only `windowBytes` more than the
 * stand-in has read are let through.
 */

import net from 'node:net';

/** A stand-in whose buffers are small. */
export interface SlowReader {
  /** How many bytes the gateway may be ahead of it; 0 for no limit. */
  readonly windowBytes: number;
  /** Its connections, by the port of the gateway's end. */
  readonly peers: ReadonlyMap<number, { readBytes: number }>;
  /** Writes of the gateway that wait until the stand-in has read more, by the same port. */
  readonly writers: Map<number, () => void>;
}

/** The stand-ins of all worlds, by address and port. */
export const STAND_INS = new Map<string, SlowReader>();

/** Continues the write that waits until the stand-in has read more. @param port that of the gateway's end. */
export function wakeWriters({ writers }: SlowReader, port: number): void {
  const wake = writers.get(port);
  writers.delete(port);
  wake?.();
}

type Write = (this: net.Socket, writev: boolean, data: unknown, encoding: string, done: Done) => void;
type Done = (error?: Error | null) => void;
const sockets = net.Socket.prototype as unknown as { _writeGeneric?: Write };
const writeAll = sockets._writeGeneric;
export const hasSmallBuffers = typeof writeAll === 'function';

/** Begins or ends to limit how far the gateway gets ahead of a stand-in. */
export function limitWrites(isLimited: boolean): void {
  if (hasSmallBuffers) sockets._writeGeneric = isLimited ? writeSome : writeAll!;
}

/** How many bytes a socket of the gateway has written to a stand-in. */
const written = new WeakMap<net.Socket, number>();

/** Writes to a stand-in no more than `windowBytes` beyond what it has read; to others everything. */
const writeSome: Write = function (writev, data, encoding, done) {
  const standIn = STAND_INS.get(`${this.remoteAddress}:${this.remotePort}`);
  const windowBytes = standIn?.windowBytes ?? 0;
  // A socket that is still connecting calls this function again when it is connected.
  if (!standIn || windowBytes === 0 || this.connecting) return writeAll!.call(this, writev, data, encoding, done);
  const port = this.localPort!;
  const bytes = bytesOf(writev, data, encoding);
  let at = 0;
  const step = (error?: Error | null): void => {
    if (error || this.destroyed || at >= bytes.length) return done(error);
    const sent = written.get(this) ?? 0;
    const roomBytes = windowBytes - (sent - (standIn.peers.get(port)?.readBytes ?? 0));
    if (roomBytes <= 0) return void standIn.writers.set(port, step);
    const part = bytes.subarray(at, at + roomBytes);
    at += part.length;
    written.set(this, sent + part.length);
    writeAll!.call(this, false, part, 'buffer', step);
  };
  step();
};

/** The bytes of one write, or of several that were gathered. */
function bytesOf(writev: boolean, data: unknown, encoding: string): Buffer {
  const all = writev ? data as unknown[] : [{ chunk: data, encoding }];
  return Buffer.concat(all.map((each) => {
    const { chunk = each, encoding = 'latin1' } = each as { chunk?: unknown; encoding?: string };
    return Buffer.from(chunk as string, encoding as BufferEncoding); // or bytes, which have no encoding
  }));
}
