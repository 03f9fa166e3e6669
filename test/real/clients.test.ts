/** Clients and libraries that docs/clients.md names, with the settings that it gives them. */

import type http from 'node:http';
import { join } from 'node:path';
import { assert } from '../assertions.ts';
import { FROM, TO } from '../samples.ts';
import { real } from './install.ts';
import { deliversOnce, REFUSED, settingsOf } from './setting.ts';

const CURL = { debian: ['curl=7.88.1-10+deb12u15', 'libcurl4=7.88.1-10+deb12u15'] };

real('curl delivers exactly once, and exits with 22 on a refusal', CURL, async (t, { run, dir, write }) => {
  // As in docs/webhooks.md, Shell and cron.
  const { wrong } = await deliversOnce(t, 'Backup done: 5 files\n', (address, token) => {
    const lines = ['fail', 'silent', 'show-error', 'output = "/dev/null"', 'max-time = 180'];
    const header = `header = "Authorization: Bearer ${token}"`;
    const file = write('signal-send', [`url = "http://${address}/v2/send"`, header, ...lines, ''].join('\n'));
    const args = ['-K', file, '-H', 'Content-Type:text/plain', '--data-binary', '@-'];
    return run(join(dir, 'usr/bin/curl'), args, { input: 'Backup done: 5 files\n' });
  });
  assert.equal(wrong.code, 22);
  assert.match(wrong.output, /401/);
});

const WGET = { debian: ['wget=1.21.3-1+deb12u1'] };

real('Wget delivers exactly once, and exits with 6 on a wrong token', WGET, async (t, { run, dir }) => {
  const { wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    const header = ['--header', `Authorization: Bearer ${token}`];
    return run(join(dir, 'usr/bin/wget'), [
      '-qO-',
      '-t1',
      ...header,
      '--post-data',
      'Backup done',
      `http://${address}/v2/send`,
    ]);
  });
  assert.equal(wrong.code, 6);
});

const WGET2 = {
  debian: [
    'wget2=1.99.1-2.2',
    'libwget0=1.99.1-2.2',
    'libgpgme11=1.18.0-3+deb12u1',
    'libassuan0=2.5.5-5',
  ],
};

real('wget2 drops the token of a URL, and delivers exactly once with a header', WGET2, async (t, { run, dir }) => {
  const wget2 = (...args: string[]) => run(join(dir, 'usr/bin/wget2'), ['-qO-', ...args]);
  const { backend } = await deliversOnce(t, 'Backup done', async (address, token) => {
    const dropped = await wget2('--post-data', 'Backup done', `http://api:${token}@${address}/v2/send`);
    assert.equal(dropped.code, 6);
    return wget2(
      '--header',
      `Authorization: Bearer ${token}`,
      '--post-data',
      'Backup done',
      `http://${address}/v2/send`,
    );
  });
  assert.equal(backend.seen.length, 1);
});

const APPRISE = { pypi: ['apprise==2.2.0'] };

real('Apprise delivers exactly once, and shows our sentence on a refusal', APPRISE, async (t, { run }) => {
  const { right, wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    return run('apprise', ['-vvv', '-b', 'Backup done', `signal://api:${token}@${address}/${FROM}/${TO}?rto=60`]);
  });
  assert.equal(right.code, 0);
  assert.equal(wrong.code, 1);
  assert.match(wrong.output, REFUSED);
});

const HOME_ASSISTANT = { pypi: ['pysignalclirestapi==0.3.25'] };

real("Home Assistant's library delivers exactly once", HOME_ASSISTANT, async (t, { run }) => {
  const { wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    const code = `
from pysignalclirestapi import SignalCliRestApi
api = SignalCliRestApi('http://api:${token}@${address}', '${FROM}')
api.send_message('Backup done', ['${TO}'])`;
    return run('python3', ['-c', code]);
  });
  assert.equal(wrong.code, 1);
});

const AIOHTTP = { pypi: ['aiohttp==3.14.5'] };

real('aiohttp sends a second message after 6 s on the connection that it kept', AIOHTTP, async (t, { run }) => {
  // Node closes an idle connection after 5 s by default, and aiohttp keeps one for 15 s.
  const settings = settingsOf();
  let first = '';
  const { backend, gateway, wrong } = await deliversOnce(t, 'second', async (address, token, { backend }) => {
    const code = `
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        for text in ('first', 'second'):
            async with session.post('http://api:${token}@${address}/v2/send', json={'message': text}) as answer:
                print(answer.status, await answer.text())
            if text == 'first': await asyncio.sleep(6)
asyncio.run(main())`;
    const result = await run('python3', ['-c', code]);
    first ||= backend.sent.shift()!.message;
    return result;
  }, settings);
  assert.equal(first, 'first');
  assert.equal(backend.seen.length, 2);
  assert.equal(gateway.requests().filter(({ status }) => status === 201).length, 2);
  assert.match(wrong.output, REFUSED);
});

const LIBSOUP = { debian: ['libsoup-3.0-0=3.2.3-0+deb12u2'] };

real('libsoup repeats a POST without its body after a 401, and is told so', LIBSOUP, async (t, { run }) => {
  const send = (url: string, header: string) => {
    const code = `
import ctypes as c
soup, glib = c.CDLL('libsoup-3.0.so.0'), c.CDLL('libglib-2.0.so.0')
for name in ('soup_session_new', 'soup_message_new', 'soup_session_send_and_read', 'soup_message_get_request_headers'):
    getattr(soup, name).restype = c.c_void_p
glib.g_bytes_new.restype = glib.g_bytes_get_data.restype = c.c_void_p
message = c.c_void_p(soup.soup_message_new(b'POST', b'${url}'))
body = c.c_void_p(glib.g_bytes_new(b'{"message":"Backup done"}', c.c_size_t(25)))
soup.soup_message_set_request_body_from_bytes(message, b'application/json', body)
if '${header}':
    headers = c.c_void_p(soup.soup_message_get_request_headers(message))
    soup.soup_message_headers_append(headers, b'Authorization', b'${header}')
answer = soup.soup_session_send_and_read(c.c_void_p(soup.soup_session_new()), message, None, None)
length = c.c_size_t()
data = glib.g_bytes_get_data(c.c_void_p(answer), c.byref(length))
print(soup.soup_message_get_status(message), c.string_at(data, length.value).decode())`;
    return run('python3', ['-c', code]);
  };
  const { wrong, right } = await deliversOnce(t, 'Backup done', async (address, token, { backend }) => {
    const dropped = await send(`http://api:${token}@${address}/v2/send`, '');
    if (backend.sent.length === 0) assert.match(dropped.output, /^400 .*The body is empty/);
    return send(`http://${address}/v2/send`, `Bearer ${token}`);
  });
  assert.match(right.output, /^201/);
  assert.match(wrong.output, REFUSED);
});

const ERLANG = {
  debian: ['erlang-base', 'erlang-inets', 'erlang-ssl', 'erlang-crypto', 'erlang-public-key', 'erlang-asn1'].map(
    (name) => `${name}=1:25.2.3+dfsg-1+deb12u4`,
  ),
};

real('httpc of Erlang delivers exactly once, and reads the refusal', ERLANG, async (t, { run, dir }) => {
  const { wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    const code = `
      inets:start(),
      {ok, {{_, Status, _}, _, Body}} = httpc:request(post,
        {"http://api:${token}@${address}/v2/send", [], "text/plain", "Backup done"}, [], []),
      io:format("~p ~s~n", [Status, Body]), halt().`;
    const root = join(dir, 'usr/lib/erlang');
    const env = { ROOTDIR: root, BINDIR: join(root, 'erts-13.1.5/bin'), EMU: 'beam', PROGNAME: 'erl' };
    return run(join(env.BINDIR, 'erlexec'), ['-noshell', '-eval', code], { env });
  });
  assert.match(wrong.output, /^401/);
  assert.match(wrong.output, REFUSED);
});

const GUILE = {
  debian: ['guile-3.0=3.0.8-2', 'guile-3.0-libs=3.0.8-2', 'libgc1=1:8.2.2-3', 'libunistring2=1.0-2'],
};

real('Guile delivers exactly once, and can read a 401', GUILE, async (t, { run, dir, write }) => {
  const { wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    const userinfo = Buffer.from(`api:${token}`).toString('base64');
    const file = write(
      'send.scm',
      `
(use-modules (web client) (web response) (rnrs bytevectors) (ice-9 receive))
(receive (response body)
  (http-post "http://${address}/v2/send" #:body "Backup done"
    #:headers '((content-type . (text/plain)) (authorization . (basic . "${userinfo}"))))
  (format #t "~a ~a\\n" (response-code response) (if (bytevector? body) (utf8->string body) body)))
`,
    );
    const libraries = join(dir, 'usr/lib/x86_64-linux-gnu/guile/3.0');
    const env = {
      GUILE_LOAD_PATH: join(dir, 'usr/share/guile/3.0'),
      GUILE_LOAD_COMPILED_PATH: join(libraries, 'ccache'),
      GUILE_SYSTEM_PATH: join(dir, 'usr/share/guile/3.0'),
      GUILE_SYSTEM_COMPILED_PATH: join(libraries, 'ccache'),
      GUILE_AUTO_COMPILE: '0',
    };
    return run(join(libraries, 'bin/guile'), ['--no-auto-compile', file], { env });
  });
  assert.match(wrong.output, /401/);
  assert.match(wrong.output, REFUSED);
});

const SIGNALBOT = { pypi: ['signalbot==2.2.1'] };

real('signalbot 2 delivers exactly once, and fetches an attachment', SIGNALBOT, async (t, { run }) => {
  const { right, wrong } = await deliversOnce(t, 'Backup done', (address, token, { backend }) => {
    const [answer] = backend.server.listeners('request') as http.RequestListener[];
    backend.server.removeAllListeners('request').on(
      'request',
      (req: http.IncomingMessage, res: http.ServerResponse) => {
        if (req.url === '/v1/attachments/photo.jpg') res.end('a photo');
        else answer!(req, res);
      },
    );
    const code = `
import asyncio
from signalbot._client.signal_api import SignalAPI, ConnectionMode
from signalbot._generated import Attachment, SendMessageV2
from signalbot.auth import BearerAuthentication
async def main():
    api = SignalAPI('${address}', '${FROM}', BearerAuthentication('${token}'), connection_mode=ConnectionMode.AUTO)
    print('available:', await api.check_signal_service())
    try:
        await api.messages.send(SendMessageV2(number='${FROM}', recipients=['${TO}'], message='Backup done'))
        print('photo:', await api.attachments.download(Attachment(id='photo.jpg', isVoiceNote=False)))
    finally:
        await api.close()
asyncio.run(main())`;
    return run('python3', ['-c', code]);
  });
  assert.match(right.output, new RegExp(`available: True\nphoto: ${Buffer.from('a photo').toString('base64')}`));
  assert.equal(wrong.code, 1);
});
