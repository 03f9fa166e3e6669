/** Reads and writes HTTP messages, for the stand-in and for the clients. */

/**
 * Reads the messages of one connection strictly, byte by byte: a head, then a body of a length, in chunks, or until the
 * connection ends. It models no trailers, no extensions of chunks and no folded headers: the gateway sends none.
 */
export abstract class MessageReader {
  /** The following bytes are ignored, or belong to a WebSocket. */
  isOver = false;
  #rest: Buffer = Buffer.alloc(0);
  /** How much of the body, or of its chunk, is still missing; undefined between two messages. */
  #leftBytes: number | undefined;
  /** The text before the size of the next chunk; undefined if the body has none. */
  #beforeSize: '' | '\r\n' | undefined;

  /** @returns the body's length, Infinity if it ends with the connection; undefined to skip the head. */
  protected abstract onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined;
  protected abstract onPart(part: Buffer): void;
  protected abstract onWhole(): void;
  protected abstract onTunnel(bytes: Buffer): void;
  protected abstract onMistake(what: string): void;

  read(chunk: Buffer): void {
    this.#rest = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : chunk;
    while (this.#rest.length > 0 && !this.isOver && this.#step());
    if (this.isOver) this.onTunnel(this.#take(Infinity));
  }

  /** @returns whether there was enough to continue. */
  #step(): boolean {
    if (this.#leftBytes === undefined) return this.#readHead();
    if (this.#leftBytes === 0) return this.#readSize();
    const part = this.#take(this.#leftBytes);
    this.#leftBytes -= part.length;
    this.onPart(part);
    if (this.#leftBytes === 0 && this.#beforeSize === undefined) this.#end();
    return true;
  }

  #readHead(): boolean {
    const end = this.#rest.indexOf('\r\n\r\n');
    if (end < 0) return this.#rest.length > 65_536 ? this.fail('a head has no end') : false;
    const [first = '', ...lines] = this.#rest.toString('latin1', 0, end).split('\r\n');
    const headers = new Map<string, string>();
    for (const line of lines) {
      const [, name, value] = /^([!#$%&'*+.^_`|~\w-]+): ?([^\r\n\0]*)$/.exec(line) ?? [];
      if (name === undefined) return this.fail('this line is no header');
      headers.set(name.toLowerCase(), value!);
    }
    this.#take(end + 4);
    const length = this.onHead(first, headers);
    if (length === undefined) return !this.isOver;
    this.#beforeSize = length === 'chunked' ? '' : undefined;
    this.#leftBytes = length === 'chunked' ? 0 : length;
    if (length === 0) this.#end();
    return true;
  }

  #readSize(): boolean {
    const text = this.#rest.toString('latin1', 0, 24);
    const [line, before, size] = /^(\r\n)?([0-9a-f]{1,8})\r\n/i.exec(text) ?? [];
    const isWrong = line === undefined ? text.length > 20 || /\S\r\n/.test(text) : (before ?? '') !== this.#beforeSize;
    if (isWrong) return this.fail('this is not the length of a chunk');
    const bytes = parseInt(size ?? '1', 16);
    const last = line + '\r\n';
    if (line === undefined || (bytes === 0 && text.length < last.length)) return false;
    if (bytes === 0 && !text.startsWith(last)) return this.fail('the last chunk has more');
    this.#take(bytes === 0 ? last.length : line.length);
    this.#beforeSize = '\r\n';
    this.#leftBytes = bytes;
    if (bytes === 0) this.#end();
    return true;
  }

  #take(bytes: number): Buffer {
    const part = this.#rest.subarray(0, bytes);
    this.#rest = this.#rest.subarray(part.length);
    return part;
  }

  #end(): void {
    this.#leftBytes = undefined;
    this.onWhole();
  }

  protected fail(what: string): false {
    this.isOver = true;
    this.onMistake(`${what}: ${JSON.stringify(this.#rest.toString('latin1', 0, 60))}`);
    return false;
  }
}

/** A body in chunks of uneven length. */
export function chunked(body: Buffer): Buffer {
  const parts: Buffer[] = [];
  for (let at = 0, bytes = 1000; at < body.length; at += bytes, bytes = bytes * 2 % 17_000 + 1) {
    const part = body.subarray(at, at + bytes);
    parts.push(Buffer.from(`${part.length.toString(16)}\r\n`), part, Buffer.from('\r\n'));
  }
  return Buffer.concat([...parts, Buffer.from('0\r\n\r\n')]);
}
